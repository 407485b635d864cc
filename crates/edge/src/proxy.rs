//! One request: whom it is for, whether it may pass, and the exchange.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use hyper::header::{CONNECTION, EXPECT, HeaderValue};
use hyper::http::request::Parts;
use hyper::upgrade::OnUpgrade;
use hyper::{Method, Request, Response, StatusCode, Version};
use tokio_util::sync::CancellationToken;

use crate::answer_body::AnswerBody;
use crate::answers::{self, Answer};
use crate::client_io::ClientState;
use crate::destination::{self, Destination};
use crate::guard::{self, Refusal};
use crate::headers::{self, Receiver};
use crate::metrics::METRICS;
use crate::routes::{Attachment, Route, RouteTable};
use crate::upstream::{Address, Failure, Lease, Upstream, is_repeatable};
use crate::{log, tunnel};

/// How much of a body nobody wants is still read, so that the client can use its connection again.
const UNWANTED_BYTES: usize = 256 * 1024;
const UNWANTED_TIME: Duration = Duration::from_secs(1);

pub struct Proxy {
    routes: Arc<RouteTable>,
    control: Upstream,
    domains: Vec<String>,
}

/// Everything about the client that an exchange needs.
struct Client {
    peer: SocketAddr,
    cut: CancellationToken,
    /// HTTP/2: other requests share the connection.
    shared: bool,
    upgrade: Option<OnUpgrade>,
}

impl Proxy {
    /// `control` is the control plane's unix socket, `domains` as [`destination::decide`] wants them.
    pub fn new(routes: Arc<RouteTable>, control: &Path, domains: Vec<String>) -> Self {
        let control = Upstream::new(
            Address::Unix(control.into()),
            Arc::default(),
            CancellationToken::new(),
        );
        Self {
            routes,
            control,
            domains,
        }
    }

    pub async fn serve(
        &self,
        peer: SocketAddr,
        state: &Arc<ClientState>,
        mut request: Request<Incoming>,
    ) -> Answer {
        let shared = request.version() == Version::HTTP_2;
        let cut = if shared {
            state.cut.child_token()
        } else {
            state.cut.clone()
        };
        if shared {
            state.set_free();
        }
        let busy = state.busy();
        let upgrade = hyper::upgrade::on(&mut request);
        let (head, body) = request.into_parts();
        let upgrade = headers::asks_for_upgrade(&head).then_some(upgrade);
        let client = Client {
            peer,
            cut,
            shared,
            upgrade,
        };
        let answer = self.answer(client, head, body).await;
        if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
            state.set_free();
        }
        answer.map(|body| body.keep(busy))
    }

    async fn answer(&self, client: Client, head: Parts, body: Incoming) -> Answer {
        let decided = headers::check_framing(&head).and_then(|()| {
            let host = headers::host(&head)?;
            Ok((
                destination::decide(host.as_deref(), &head.headers, &self.domains)?,
                host,
            ))
        });
        let (destination, host) = match decided {
            Ok(decided) => decided,
            Err(malformed) => {
                METRICS.refused.add();
                return instead(answers::refusal(400, malformed.0), &head, body).await;
            }
        };
        if head.method == Method::CONNECT {
            METRICS.refused.add();
            return instead(
                answers::refusal(405, "CONNECT is not served here"),
                &head,
                body,
            )
            .await;
        }
        match destination {
            Destination::ControlPlane => self.to_control_plane(client, head, body, host).await,
            Destination::Sandbox {
                id,
                port,
                by_headers,
            } => {
                self.to_sandbox(
                    client,
                    head,
                    body,
                    host,
                    Target {
                        id,
                        port,
                        by_headers,
                    },
                )
                .await
            }
        }
    }

    async fn to_control_plane(
        &self,
        client: Client,
        mut head: Parts,
        body: Incoming,
        host: Option<String>,
    ) -> Answer {
        METRICS.to_control.add();
        let unavailable = |cause: &dyn std::fmt::Display, retry: bool| {
            METRICS.control_down.add();
            log::line(&format!("the control plane does not answer: {cause}"));
            answers::unavailable(
                "The control plane is not available; it may be restarting",
                retry,
            )
        };
        let lease = match self.control.connection(is_repeatable(&head, &body)).await {
            Ok(lease) => lease,
            Err(failure) => {
                return instead(unavailable(&cause(&failure), true), &head, body).await;
            }
        };
        let repeatable = head.method.is_idempotent();
        headers::rewrite_request(
            &mut head,
            Receiver::ControlPlane,
            host.as_deref(),
            client.peer.ip(),
        );
        match self.control.send(lease, head, body).await {
            Ok((response, lease)) => passed_on(client, response, lease, None),
            Err(Failure::Body(_)) => broken_body(),
            // It may have acted on the request; only the client knows whether twice is harmless.
            Err(failure @ Failure::Lost(_)) => unavailable(&cause(&failure), repeatable),
            Err(failure) => unavailable(&cause(&failure), true),
        }
    }

    async fn to_sandbox(
        &self,
        client: Client,
        mut head: Parts,
        body: Incoming,
        host: Option<String>,
        target: Target,
    ) -> Answer {
        METRICS.to_sandboxes.add();
        let Target {
            id,
            port,
            by_headers,
        } = target;
        let route = self.routes.get(&id);
        let Some((route, upstream)) =
            route.and_then(|route| Some((Arc::clone(&route), route.upstream(port)?)))
        else {
            return instead(not_found(&id), &head, body).await;
        };
        if let Err(refusal) = guard::check(
            &route.spec,
            port,
            &head.method,
            head.uri.path(),
            &head.headers,
        ) {
            METRICS.refused.add();
            return instead(refused(&refusal), &head, body).await;
        }
        let connected = upstream.connection(is_repeatable(&head, &body)).await;
        // Until there is something of an answer to break off, the end of the route has an answer of its own.
        let ended = CancellationToken::new();
        let attached = match connected {
            Ok(lease) => route
                .attach(ended.clone())
                .map(|waiting| (lease, waiting))
                .ok_or(Failure::RouteEnded),
            Err(failure) => Err(failure),
        };
        let (lease, _waiting) = match attached {
            Ok(attached) => attached,
            Err(failure) => {
                return instead(not_connected(&failure, &route, &id, port), &head, body).await;
            }
        };
        let envd = port == route.spec.envd_port;
        headers::rewrite_request(
            &mut head,
            Receiver::Sandbox { envd, by_headers },
            host.as_deref(),
            client.peer.ip(),
        );
        let sent = tokio::select! {
            biased;
            () = ended.cancelled() => Err(Failure::RouteEnded),
            sent = upstream.send(lease, head, body) => sent,
        };
        match sent {
            Ok((response, lease)) => match route.attach(client.cut.clone()) {
                Some(attachment) => passed_on(client, response, lease, Some(attachment)),
                None => not_found(&id),
            },
            Err(Failure::Body(_)) if !route.has_ended() => broken_body(),
            Err(failure @ Failure::Lost(_)) if !route.has_ended() => {
                METRICS.broken.add();
                log::line(&format!(
                    "sandbox {id} generation {} port {port}: {}",
                    route.spec.generation,
                    cause(&failure)
                ));
                answers::sandbox_did_not_answer(&id, port)
            }
            Err(failure) => not_connected(&failure, &route, &id, port),
        }
    }
}

struct Target {
    id: String,
    port: u16,
    by_headers: bool,
}

/// Upstream's answer as the client's. An agreement on another protocol starts the tunnel.
fn passed_on(
    client: Client,
    mut response: Response<Incoming>,
    lease: Lease,
    attachment: Option<Attachment>,
) -> Answer {
    let switches = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    headers::rewrite_response(response.headers_mut(), switches);
    if !switches {
        return response
            .map(|body| AnswerBody::stream(body, lease, attachment, client.cut, client.shared));
    }
    let Some(upgrade) = client.upgrade else {
        METRICS.broken.add();
        return answers::refusal(502, "The upstream switched to a protocol nobody asked for");
    };
    tunnel::spawn(
        upgrade,
        hyper::upgrade::on(&mut response),
        attachment,
        client.cut,
    );
    response.map(|_| AnswerBody::whole(bytes::Bytes::new()))
}

fn not_found(id: &str) -> Answer {
    METRICS.not_found.add();
    answers::sandbox_not_found(id)
}

/// The client may have hung up; then nobody reads this.
fn broken_body() -> Answer {
    METRICS.refused.add();
    answers::refusal(400, "The request's body is malformed or broke off")
}

fn refused(refusal: &Refusal) -> Answer {
    match refusal {
        Refusal::ControlCall => answers::refusal(404, "There is no such path"),
        Refusal::AccessToken => answers::refusal(401, "X-Access-Token is missing or wrong"),
        Refusal::TrafficToken => {
            answers::refusal(403, "e2b-traffic-access-token is missing or wrong")
        }
    }
}

fn not_connected(failure: &Failure, route: &Route, id: &str, port: u16) -> Answer {
    use io::ErrorKind::{
        ConnectionRefused, ConnectionReset, HostUnreachable, NetworkUnreachable, TimedOut,
    };
    match failure {
        Failure::RouteEnded => not_found(id),
        _ if route.has_ended() => not_found(id),
        Failure::Connect(error)
            if !matches!(
                error.kind(),
                ConnectionRefused
                    | ConnectionReset
                    | HostUnreachable
                    | NetworkUnreachable
                    | TimedOut
            ) =>
        {
            log::line(&format!(
                "sandbox {id} generation {} port {port}: {error}",
                route.spec.generation
            ));
            answers::unavailable("The proxy cannot open a connection; try later", true)
        }
        _ => {
            METRICS.port_closed.add();
            answers::port_not_open(id, port)
        }
    }
}

fn cause(failure: &Failure) -> String {
    match failure {
        Failure::RouteEnded => "the route ended".to_owned(),
        Failure::Connect(error) => error.to_string(),
        Failure::Lost(error) | Failure::Body(error) => std::error::Error::source(error)
            .map_or(error.to_string(), |source| format!("{error}: {source}")),
    }
}

/// `answer` instead of the exchange. Reads what little body there is; a client with more to send loses its connection after the answer.
async fn instead(mut answer: Answer, head: &Parts, mut body: Incoming) -> Answer {
    let mut left = UNWANTED_BYTES;
    let read = async {
        while let Some(Ok(frame)) = body.frame().await {
            left = left.saturating_sub(frame.data_ref().map_or(0, bytes::Bytes::len));
            if left == 0 {
                return;
            }
        }
    };
    // Reading would invite a waiting client to send.
    if !head.headers.contains_key(EXPECT) {
        let _ = tokio::time::timeout(UNWANTED_TIME, read).await;
    }
    if !body.is_end_stream() && head.version != Version::HTTP_2 {
        answer
            .headers_mut()
            .insert(CONNECTION, HeaderValue::from_static("close"));
    }
    answer
}
