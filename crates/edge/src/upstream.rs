//! HTTP/1.1 towards one sandbox port or the control plane: connect, send, use a connection again.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper::http::request::Parts;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_util::sync::CancellationToken;

use crate::metrics::METRICS;
use crate::upstream_io::UpstreamIo;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Idle connections kept for one port.
const SPARE_CONNECTIONS: usize = 64;
/// Guests close idle connections when they like. A request that may be sent twice survives that and takes any connection; the others
/// take one used so recently that no server would have closed it.
const IDLE_LIMIT: Duration = Duration::from_secs(60);
const FRESH_LIMIT: Duration = Duration::from_secs(1);
/// Also what bounds a response's head, to within a factor of two.
const BUFFER_BYTES: usize = 64 * 1024;

#[derive(Clone)]
pub enum Address {
    Tcp(SocketAddr),
    Unix(Arc<Path>),
}

impl Address {
    /// What tells connections of one pool apart.
    fn key(&self) -> u16 {
        match self {
            Self::Tcp(address) => address.port(),
            Self::Unix(_) => 0,
        }
    }
}

/// Why a request got no answer.
pub enum Failure {
    /// The route ended before there was a connection.
    RouteEnded,
    /// No connection; nothing was sent.
    Connect(io::Error),
    /// The connection broke, or what came was not HTTP. The request may have been acted on.
    Lost(hyper::Error),
    /// The client's body broke off or was not HTTP, so the request was given up. A part of it may have been acted on.
    Body(hyper::Error),
}

impl Failure {
    fn of(error: hyper::Error) -> Self {
        // What is passed on is taken from the client's connection, so "user" is the client here.
        if error.is_user() {
            Self::Body(error)
        } else {
            Self::Lost(error)
        }
    }
}

/// One endpoint with the pool its connections come from. When `ended` is cancelled every connection closes, in use or not.
#[derive(Clone)]
pub struct Upstream {
    address: Address,
    pool: Arc<Pool>,
    ended: CancellationToken,
}

impl Upstream {
    pub fn new(address: Address, pool: Arc<Pool>, ended: CancellationToken) -> Self {
        Self {
            address,
            pool,
            ended,
        }
    }

    /// A connection, used before or new.
    pub async fn connection(&self, repeatable: bool) -> Result<Lease, Failure> {
        match self.pool.take(
            self.address.key(),
            if repeatable { IDLE_LIMIT } else { FRESH_LIMIT },
        ) {
            Some(sender) => Ok(self.lease(sender, true)),
            None => self.connect().await,
        }
    }

    /// Sends on `lease`; when that turns out to have been closed by the other side, and it is safe, once more on a new connection.
    pub async fn send(
        &self,
        lease: Lease,
        head: Parts,
        body: Incoming,
    ) -> Result<(Response<Incoming>, Lease), Failure> {
        let Lease {
            mut sender, used, ..
        } = lease;
        let spare = (used && is_repeatable(&head, &body)).then(|| head.clone());
        let error = match sender
            .try_send_request(Request::from_parts(head, RequestBody(Some(body))))
            .await
        {
            Ok(response) => return Ok((response, self.lease(sender, used))),
            Err(error) => error,
        };
        let mut error = error;
        let unsent = error.take_message();
        let again =
            unsent.or_else(|| spare.map(|head| Request::from_parts(head, RequestBody(None))));
        let Some(request) = again.filter(|_| used) else {
            return Err(Failure::of(error.into_error()));
        };
        METRICS.retries.add();
        let mut lease = self.connect().await?;
        match lease.sender.try_send_request(request).await {
            Ok(response) => Ok((response, lease)),
            Err(error) => Err(Failure::of(error.into_error())),
        }
    }

    async fn connect(&self) -> Result<Lease, Failure> {
        METRICS.connects.add();
        let connecting = async {
            match &self.address {
                Address::Tcp(address) => {
                    let stream = TcpStream::connect(address).await?;
                    stream.set_nodelay(true)?;
                    self.handshake(stream).await
                }
                Address::Unix(path) => self.handshake(UnixStream::connect(path).await?).await,
            }
        };
        tokio::select! {
            biased;
            () = self.ended.cancelled() => Err(Failure::RouteEnded),
            result = tokio::time::timeout(CONNECT_TIMEOUT, connecting) => match result {
                Ok(Ok(sender)) => Ok(self.lease(sender, false)),
                Ok(Err(error)) => Err(Failure::Connect(error)),
                Err(_) => Err(Failure::Connect(io::ErrorKind::TimedOut.into())),
            },
        }
    }

    async fn handshake<T>(&self, stream: T) -> io::Result<SendRequest<RequestBody>>
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, connection) = Builder::new()
            .max_buf_size(BUFFER_BYTES)
            .handshake(TokioIo::new(UpstreamIo::new(stream)))
            .await
            .map_err(io::Error::other)?;
        let ended = self.ended.clone();
        // Errors reach whoever waits for an answer; an idle connection's end is no error.
        tokio::spawn(async move {
            tokio::select! {
                biased;
                () = ended.cancelled() => {}
                _ = connection.with_upgrades() => {}
            }
        });
        Ok(sender)
    }

    fn lease(&self, sender: SendRequest<RequestBody>, used: bool) -> Lease {
        Lease {
            sender,
            used,
            pool: Arc::clone(&self.pool),
            key: self.address.key(),
        }
    }
}

/// A connection taken for one exchange. Dropped, it closes.
pub struct Lease {
    sender: SendRequest<RequestBody>,
    used: bool,
    pool: Arc<Pool>,
    key: u16,
}

impl Lease {
    /// The exchange is over and went well: the connection may serve another.
    pub fn give_back(self) {
        self.pool.put(self.key, self.sender);
    }
}

/// Sending it twice is as good as once: the method says so, and there is no body that could be gone.
pub fn is_repeatable(head: &Parts, body: &Incoming) -> bool {
    head.method.is_idempotent() && body.is_end_stream()
}

/// Idle connections by port, the one used last on top.
#[derive(Default)]
pub struct Pool(Mutex<HashMap<u16, Vec<Idle>>>);

struct Idle {
    sender: SendRequest<RequestBody>,
    since: Instant,
}

impl Pool {
    fn take(&self, key: u16, longest_idle: Duration) -> Option<SendRequest<RequestBody>> {
        let mut ports = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = ports.get_mut(&key)?;
        let position = idle.iter().rposition(|connection| {
            connection.sender.is_ready() && connection.since.elapsed() < longest_idle
        })?;
        METRICS.reuses.add();
        Some(idle.remove(position).sender)
    }

    fn put(&self, key: u16, sender: SendRequest<RequestBody>) {
        let mut ports = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = ports.entry(key).or_default();
        if idle.len() < SPARE_CONNECTIONS && !sender.is_closed() {
            idle.push(Idle {
                sender,
                since: Instant::now(),
            });
        }
    }

    /// Drops what is closed or was idle for long.
    pub fn sweep(&self) {
        let mut ports = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ports.retain(|_, idle| {
            idle.retain(|connection| {
                !connection.sender.is_closed() && connection.since.elapsed() < IDLE_LIMIT
            });
            !idle.is_empty()
        });
    }
}

/// A client's body on its way up; None is no body.
pub struct RequestBody(Option<Incoming>);

impl Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        self.0
            .as_mut()
            .map_or(Poll::Ready(None), |body| Pin::new(body).poll_frame(cx))
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.0
            .as_ref()
            .map_or(SizeHint::with_exact(0), Body::size_hint)
    }
}
