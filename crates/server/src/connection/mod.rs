//! Connections: accepted, bounded in number and time, and closed when the server stops.

use std::{future::Future, net::TcpListener, pin::pin, sync::Arc, time::Duration};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::sync::Semaphore;

/// Connections that are open at the same time; others wait to be accepted.
const MAX_CONNECTIONS: usize = 1024;

/// Time for the head of a request to arrive, on a new connection and on an idle one.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// Bytes of a request's head, at most.
const HEAD_BYTES: usize = 64 << 10;

/// Headers of a request, at most.
const MAX_HEADERS: usize = 100;

/// Wait before accepting again when the system is out of sockets.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Answers requests on `listener` until `stop` is ready, then those that have begun.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    stop: impl Future<Output = ()>,
) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let mut server = http1::Builder::new();
    server
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(HEAD_BYTES)
        .max_headers(MAX_HEADERS);
    let service = TowerToHyperService::new(router);
    let graceful = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut stop = pin!(stop);
    loop {
        let accepted = async {
            // The semaphore is never closed.
            let place = Arc::clone(&places).acquire_owned().await;
            (listener.accept().await, place)
        };
        let (stream, place) = tokio::select! {
            (accepted, place) = accepted => match accepted {
                Ok((stream, _)) => (stream, place),
                Err(_) => {
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
            () = &mut stop => break,
        };
        // Tokens are sent as they come.
        let _ = stream.set_nodelay(true);
        let connection = server.serve_connection(TokioIo::new(stream), service.clone());
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            // A client that closes its connection is not an error.
            let _ = connection.await;
            drop(place);
        });
    }
    drop(listener);
    graceful.shutdown().await;
    Ok(())
}
