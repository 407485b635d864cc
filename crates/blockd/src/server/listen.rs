//! The listener on the unix socket.

use std::convert::Infallible;
use std::io;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;

use crate::server::api::{Api, handle};
use crate::server::connection::Connection;

/// Operations that may run at once; further ones wait.
const MAX_OPERATIONS: usize = 64;
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// Serves until the process ends.
///
/// # Errors
/// When the runtime cannot be made.
pub fn serve(listener: UnixListener, api: Arc<Api>) -> io::Result<Infallible> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .max_blocking_threads(MAX_OPERATIONS)
        .build()?;
    listener.set_nonblocking(true)?;
    runtime.block_on(async {
        let listener = tokio::net::UnixListener::from_std(listener)?;
        loop {
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    log::warn!("accept: {error}");
                    // Most likely out of descriptors: let what holds them go on first.
                    tokio::task::yield_now().await;
                    std::thread::sleep(ACCEPT_PAUSE);
                    continue;
                }
            };
            let (connection, descriptors) = Connection::new(stream);
            let api = api.clone();
            let service =
                service_fn(move |request| handle(api.clone(), descriptors.clone(), request));
            tokio::spawn(async move {
                if let Err(error) = http1::Builder::new()
                    .serve_connection(connection, service)
                    .await
                {
                    log::debug!("connection: {error}");
                }
            });
        }
    })
}
