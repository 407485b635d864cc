//! The owner's side: routes, health, metrics and stopping, as HTTP and JSON on a unix socket.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;

use crate::log;
use crate::metrics::METRICS;
use crate::routes::{Late, RouteSpec, RouteTable};

/// A table of 100,000 routes takes about 25 MiB.
const LARGEST_BODY: usize = 64 * 1024 * 1024;

type Reply = Response<Full<Bytes>>;

pub struct Admin {
    pub routes: Arc<RouteTable>,
    /// The address the public port really has.
    pub listen: String,
    pub stopping: CancellationToken,
}

/// A request that cannot be done: status and message.
struct Refused(u16, String);

#[derive(Deserialize)]
struct Table {
    routes: BTreeMap<String, RouteSpec>,
}

impl Admin {
    /// Serves until the process ends: a stopping edge still answers.
    pub async fn run(self, socket: UnixListener) {
        let admin = Arc::new(self);
        loop {
            let stream = match socket.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    log::line(&format!("cannot accept on the admin socket: {error}"));
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                    continue;
                }
            };
            let admin = Arc::clone(&admin);
            tokio::spawn(async move {
                let service = service_fn(|request| admin.serve(request));
                // A broken connection is the owner's to notice.
                let _ = Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    }

    async fn serve(&self, request: Request<Incoming>) -> Result<Reply, Infallible> {
        let what = format!("{} {}", request.method(), request.uri().path());
        Ok(self
            .answer(request)
            .await
            .unwrap_or_else(|Refused(status, message)| {
                log::line(&format!("refused {what}: {message}"));
                json_reply(status, &json!({"code": status, "message": message}))
            }))
    }

    async fn answer(&self, request: Request<Incoming>) -> Result<Reply, Refused> {
        let method = request.method().clone();
        let path = request.uri().path().to_owned();
        let query = request.uri().query().unwrap_or_default().to_owned();
        match (method, path.as_str()) {
            (Method::GET, "/health") => {
                let version = env!("CARGO_PKG_VERSION");
                Ok(json_reply(
                    200,
                    &json!({"version": version, "pid": std::process::id(), "listen": self.listen}),
                ))
            }
            (Method::GET, "/metrics") => Ok(self.metrics()),
            (Method::POST, "/shutdown") => {
                self.stopping.cancel();
                Ok(done())
            }
            (Method::GET, "/routes") => {
                Ok(json_reply(200, &json!({"routes": self.routes.specs()})))
            }
            (Method::PUT, "/routes") => {
                let table: Table = read(request).await?;
                table
                    .routes
                    .iter()
                    .try_for_each(|(id, spec)| check(id, spec))?;
                self.routes.replace(table.routes);
                Ok(done())
            }
            (method, path) => match (method, path.strip_prefix("/routes/")) {
                (Method::PUT, Some(id)) => {
                    let spec: RouteSpec = read(request).await?;
                    check(id, &spec)?;
                    self.routes.put(id, spec).map_err(|late| conflict(&late))?;
                    Ok(done())
                }
                (Method::DELETE, Some(id)) => {
                    let generation = query
                        .strip_prefix("generation=")
                        .and_then(|number| number.parse().ok());
                    let generation = generation
                        .ok_or_else(|| Refused(400, "?generation=N is missing".into()))?;
                    self.routes
                        .delete(id, generation)
                        .map_err(|late| conflict(&late))?;
                    Ok(done())
                }
                _ => Err(Refused(404, "no such call".into())),
            },
        }
    }

    fn metrics(&self) -> Reply {
        let mut reply = Response::new(Full::from(METRICS.prometheus(self.routes.len())));
        reply.headers_mut().insert(
            CONTENT_TYPE,
            HeaderValue::from_static("text/plain; version=0.0.4"),
        );
        reply
    }
}

fn check(id: &str, spec: &RouteSpec) -> Result<(), Refused> {
    let valid = (1..=64).contains(&id.len())
        && id
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
    if !valid {
        return Err(Refused(400, format!("{id:?} is not a sandbox ID")));
    }
    spec.check()
        .map_err(|message| Refused(400, format!("{id}: {message}")))
}

fn conflict(late: &Late) -> Refused {
    Refused(409, format!("generation {} is known", late.0))
}

async fn read<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T, Refused> {
    let body = Limited::new(request.into_body(), LARGEST_BODY)
        .collect()
        .await
        .map_err(|error| Refused(400, error.to_string()))?;
    serde_json::from_slice(&body.to_bytes()).map_err(|error| Refused(400, error.to_string()))
}

fn done() -> Reply {
    let mut reply = Response::new(Full::default());
    *reply.status_mut() = StatusCode::NO_CONTENT;
    reply
}

fn json_reply(status: u16, body: &serde_json::Value) -> Reply {
    let mut reply = Response::new(Full::from(body.to_string()));
    *reply.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    reply
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    reply
}
