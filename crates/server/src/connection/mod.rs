//! Connections: accepted, bounded in number and time, and closed when the server stops.
//!
//! `/health` cannot be starved. Every connection is accepted, never left in the system's queue. If all places are taken, the
//! connection whose client has kept the server waiting longest gives way to the new one: this client sends a head or a body
//! slowly, reads slowly, or is idle. If no client has kept the server waiting for more than a moment, the requests in all places
//! are being answered. The new connection then gets an extra place, in which `/health` is answered at once and everything else is
//! refused at once. Extra places have no other work, so the oldest of them gives way to the next. One address has at most half of
//! the places, so a client pushes out its own connections first.

mod body;
mod places;
mod stream;
mod waiting;

use std::{
    convert::Infallible,
    future::Future,
    io,
    net::{SocketAddr, TcpListener},
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Router,
    http::{HeaderValue, Request, Response, header},
};
use hyper::{
    body::Incoming,
    server::conn::http1,
    service::{Service, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::net::TcpStream;

pub(crate) use self::{body::BodyTooSlow, places::Places};
use self::{
    body::{AnsweredBody, ReceivedBody},
    places::{Place, Table},
    stream::ClientStream,
    waiting::Connection,
};
use crate::api::error::ApiError;

/// Time limit for the head of a request to arrive, on a new connection and on an idle one.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum bytes of a request's head.
const HEAD_BYTES: usize = 64 << 10;

/// Maximum number of headers of a request.
const MAX_HEADERS: usize = 100;

/// Wait before accepting again when the system is out of sockets.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Connections that may wait to be accepted. With the default of 128, clients of a burst would try again only after a second.
const BACKLOG: i32 = 1024;

/// Time that a stopping server gives to requests that it is answering.
pub const SHUTDOWN_LIMIT: Duration = Duration::from_secs(60);

/// Time at shutdown for clients that keep the server waiting.
const SHUTDOWN_PATIENCE: Duration = Duration::from_secs(2);

/// Interval at which a stopping server checks its connections.
const SHUTDOWN_INTERVAL: Duration = Duration::from_millis(20);

/// A listener on `address` that does not block.
///
/// # Errors
///
/// The address cannot be used.
pub(crate) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    rustix::net::listen(&listener, BACKLOG)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Answers requests on `listener` until `stop` is ready, then those that have begun.
///
/// # Errors
///
/// The system cannot watch the listener.
pub(crate) async fn serve(
    listener: TcpListener,
    places: Places,
    router: Router,
    stop: impl Future<Output = ()>,
) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let table = Arc::new(Table::new(places));
    let connections = Connections::new(router, Arc::clone(&table));
    let mut stop = pin!(stop);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, client)) => connections.open(stream, client),
                Err(error) => {
                    if error.kind() != io::ErrorKind::ConnectionAborted {
                        // The system is out of files or memory.
                        table.close_longest_waiting();
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            () = &mut stop => break,
        }
    }
    drop(listener);
    connections.close().await;
    Ok(())
}

/// How connections are served.
struct Connections {
    http: http1::Builder,
    service: TowerToHyperService<Router>,
    graceful: GracefulShutdown,
    table: Arc<Table>,
}

impl Connections {
    fn new(router: Router, table: Arc<Table>) -> Self {
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(HEAD_BYTES)
            .max_headers(MAX_HEADERS);
        Self {
            http,
            service: TowerToHyperService::new(router),
            graceful: GracefulShutdown::new(),
            table,
        }
    }

    /// Serves a connection in a task.
    fn open(&self, stream: TcpStream, client: SocketAddr) {
        // Tokens are sent as they come.
        let _ = stream.set_nodelay(true);
        let (connection, place) = self.table.admit(client.ip());
        let stream = ClientStream::new(stream, Arc::clone(&connection));
        let answer = {
            let (service, connection) = (self.service.clone(), Arc::clone(&connection));
            move |request| answer(service.clone(), Arc::clone(&connection), place, request)
        };
        let served = self
            .http
            .serve_connection(TokioIo::new(stream), service_fn(answer));
        let served = self.graceful.watch(served);
        let (table, id) = (Arc::clone(&self.table), connection.id());
        let task = tokio::spawn(async move {
            let _left = table.leave_on_drop(id);
            // A client that closes its connection is not an error.
            let _ = served.await;
        });
        self.table.started(id, task.abort_handle());
    }

    /// Finishes the requests that are being answered, then closes all connections.
    async fn close(self) {
        let end = Instant::now() + SHUTDOWN_LIMIT;
        // Connections answer no further request.
        let mut idle = pin!(self.graceful.shutdown());
        while Instant::now() < end {
            self.table.close_waiting(SHUTDOWN_PATIENCE);
            let wait = tokio::time::timeout(SHUTDOWN_INTERVAL, &mut idle);
            if wait.await.is_ok() {
                return;
            }
        }
        self.table.close_waiting(Duration::ZERO);
        self.table.close_all();
    }
}

/// Answers a request and records whether the server waits for the client.
async fn answer(
    service: TowerToHyperService<Router>,
    connection: Arc<Connection>,
    place: Place,
    request: Request<Incoming>,
) -> Result<Response<AnsweredBody>, Infallible> {
    let is_health = request.uri().path() == "/health";
    let response = match place {
        Place::Extra if !is_health => ApiError::too_many_connections().at(request.uri().path()),
        _ => {
            let request = request.map(|body| ReceivedBody::new(body, Arc::clone(&connection)));
            service.call(request).await?
        }
    };
    let mut response = response.map(|body| AnsweredBody::new(body, connection));
    if let Place::Extra = place {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(header::CONNECTION, close);
    }
    Ok(response)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpStream};

    use super::*;

    #[test]
    fn a_burst_of_clients_waits_to_be_accepted() {
        let listener = listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let address = listener.local_addr().unwrap();
        let connect = |_| TcpStream::connect_timeout(&address, Duration::from_secs(5));
        let clients: io::Result<Vec<_>> = (0..300).map(connect).collect();
        assert_eq!(clients.unwrap().len(), 300);
    }
}
