//! Threads for work whose duration depends on a request, so that the thread that serves all connections does none of it.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
};

use tokio::sync::oneshot;

use crate::api::error::ApiError;

type Job = Box<dyn FnOnce() + Send>;

/// A fixed number of threads; each connection gives them at most one piece of work at a time.
pub(crate) struct Workers {
    jobs: mpsc::Sender<Job>,
}

impl Workers {
    /// Starts `count` threads.
    ///
    /// # Errors
    ///
    /// The system refuses a thread.
    pub(crate) fn start(name: &str, count: usize) -> io::Result<Self> {
        let (jobs, receiver) = mpsc::channel::<Job>();
        let receiver = Arc::new(Mutex::new(receiver));
        for _ in 0..count {
            let receiver = Arc::clone(&receiver);
            let next = move || {
                let receiver = receiver.lock().unwrap_or_else(PoisonError::into_inner);
                receiver.recv().ok()
            };
            let work = move || {
                while let Some(job) = next() {
                    // After a panic, whoever waits for the result learns that there is none.
                    let _ = catch_unwind(AssertUnwindSafe(job));
                }
            };
            thread::Builder::new().name(name.to_owned()).spawn(work)?;
        }
        Ok(Self { jobs })
    }

    /// Does `work` on one of the threads; skips it if the client has gone before it begins.
    ///
    /// # Errors
    ///
    /// `work` panicked.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let (sender, result) = oneshot::channel();
        let job = move || {
            if !sender.is_closed() {
                let _ = sender.send(work());
            }
        };
        let _ = self.jobs.send(Box::new(job));
        let failed = |_| ApiError::server("this request made the server fail; please report it");
        result.await.map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_of_its_request_alone() {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.unwrap().block_on(async {
            let workers = Workers::start("test", 1).unwrap();
            assert!(workers.run(|| panic!("for the test")).await.is_err());
            assert_eq!(workers.run(|| 1).await.unwrap(), 1);
        });
    }
}
