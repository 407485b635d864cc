//! The public port: accepts clients, bounds their number, serves each on its own task.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::answers::TOO_MANY_CONNECTIONS;
use crate::client_io::{ClientIo, ClientState};
use crate::log;
use crate::metrics::METRICS;
use crate::proxy::Proxy;

/// Longer than SDKs keep idle connections (300 s), so that it is the client who closes and no request meets a closing connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(330);
/// Also what bounds a request's head, to within a factor of two.
const BUFFER_BYTES: usize = 64 * 1024;
const STREAMS_PER_CONNECTION: u32 = 128;
const REFUSALS_AT_ONCE: usize = 256;
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// The two steps of stopping.
#[derive(Clone, Default)]
pub struct Stop {
    /// No new connections; those there finish what they are at.
    pub stopping: CancellationToken,
    /// What is left is cut.
    pub abandon: CancellationToken,
}

pub struct Listener {
    pub socket: TcpListener,
    pub proxy: Arc<Proxy>,
    pub connections: Arc<Semaphore>,
    pub stop: Stop,
}

impl Listener {
    /// Accepts until told to stop.
    pub async fn run(self) {
        let refusals = Arc::new(Semaphore::new(REFUSALS_AT_ONCE));
        loop {
            let accepted = tokio::select! {
                biased;
                () = self.stop.stopping.cancelled() => return,
                accepted = self.socket.accept() => accepted,
            };
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors or memory: accepting at once again would only spin.
                    log::line(&format!("cannot accept: {error}"));
                    sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            if let Ok(permit) = Arc::clone(&self.connections).try_acquire_owned() {
                tokio::spawn(serve(
                    stream,
                    peer,
                    permit,
                    Arc::clone(&self.proxy),
                    self.stop.clone(),
                ));
            } else {
                METRICS.clients_refused.add();
                log::line("refused a connection: too many");
                if let Ok(permit) = Arc::clone(&refusals).try_acquire_owned() {
                    tokio::spawn(refuse(stream, permit));
                }
            }
        }
    }
}

async fn serve(
    stream: TcpStream,
    peer: SocketAddr,
    permit: OwnedSemaphorePermit,
    proxy: Arc<Proxy>,
    stop: Stop,
) {
    // They fail only on a connection that is gone already.
    let _ = stream.set_nodelay(true);
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_IDLE)
        .with_interval(KEEPALIVE_INTERVAL);
    let _ = SockRef::from(&stream).set_tcp_keepalive(&keepalive);

    let state = ClientState::new(stop.abandon.child_token());
    let io = TokioIo::new(ClientIo::new(stream, Arc::clone(&state), permit));
    let service = service_fn(|request| {
        let (proxy, state) = (Arc::clone(&proxy), Arc::clone(&state));
        async move { Ok::<_, Infallible>(proxy.serve(peer, &state, request).await) }
    });
    let builder = protocol();
    let mut connection = pin!(builder.serve_connection_with_upgrades(io, service));
    let mut finishing = false;
    loop {
        tokio::select! {
            biased;
            () = state.cut.cancelled() => return,
            // Whatever went wrong between edge and the client, the client knows.
            _ = connection.as_mut() => return,
            () = stop.stopping.cancelled(), if !finishing => {
                connection.as_mut().graceful_shutdown();
                finishing = true;
            }
        }
    }
}

fn protocol() -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE_TIMEOUT)
        .max_buf_size(BUFFER_BYTES);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_PER_CONNECTION)
        .max_header_list_size(BUFFER_BYTES as u32)
        .max_send_buf_size(BUFFER_BYTES)
        .keep_alive_interval(KEEPALIVE_IDLE);
    builder
}

/// Says why and waits until the client has read it, or a second.
async fn refuse(mut stream: TcpStream, _permit: OwnedSemaphorePermit) {
    let answer = async {
        stream.write_all(TOO_MANY_CONNECTIONS.as_bytes()).await?;
        stream.shutdown().await?;
        let mut unwanted = [0; 4096];
        while stream.read(&mut unwanted).await? > 0 {}
        io::Result::Ok(())
    };
    let _ = timeout(Duration::from_secs(1), answer).await;
}
