//! The routes of docs/protocols/blockd.md: decoding requests, calling the engine on a thread that
//! may block, encoding answers.

use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, StatusCode, header};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::error::{Code, Error, Result};
use crate::image::table::{Images, OpenRequest, check_paths};
use crate::layer::compact::{CompactRequest, compact};
use crate::layer::import::{DiffRequest, RawRequest, import_diff, import_raw};
use crate::layer::writer::Written;
use crate::memory::capture::{CaptureRequest, capture};
use crate::memory::pages::Copied;
use crate::metrics::METRICS;
use crate::server::connection::Descriptors;

/// A request names at most 255 paths of at most 4 KiB.
const MAX_BODY: usize = 2 << 20;
/// Between a request to end and the end, so that the answer gets out.
const TIME_TO_ANSWER: Duration = Duration::from_millis(50);

/// Called by `POST /shutdown` and when the process is asked to end.
pub type Shutdown = fn();

pub struct Api {
    pub images: Images,
    pub shutdown: Shutdown,
}

/// What an operation answers.
enum Answer {
    Json(Value),
    Nothing,
    Text(String),
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Layers {
    layers: Vec<PathBuf>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct OneLayer {
    layer: PathBuf,
}

/// Answers one request. `descriptors` came with it.
pub async fn handle(
    api: Arc<Api>,
    descriptors: Descriptors,
    request: Request<Incoming>,
) -> std::result::Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = request.into_parts();
    let body = Limited::new(body, MAX_BODY).collect().await;
    // Taken whatever becomes of the request, so that the next one on this connection does not find
    // them.
    let descriptors = std::mem::take(&mut *descriptors.lock());
    let answer = match body {
        Err(error) => Err(Error::invalid(format!("read the request's body: {error}"))),
        Ok(body) => {
            let route = move || {
                let path = head.uri.path().to_owned();
                let query = head.uri.query().unwrap_or_default().to_owned();
                api.route(&head.method, &path, &query, &body.to_bytes(), descriptors)
            };
            // Goes on to its end even when the client hangs up.
            let done = tokio::task::spawn_blocking(route).await;
            done.unwrap_or_else(|panic| {
                Err(Error::new(Code::Io, format!("internal error: {panic}")))
            })
        }
    };
    Ok(respond(answer))
}

impl Api {
    fn route(
        &self,
        method: &Method,
        path: &str,
        query: &str,
        body: &[u8],
        descriptors: Vec<OwnedFd>,
    ) -> Result<Answer> {
        let segments: Vec<&str> = path.trim_matches('/').split('/').collect();
        let files = || self.images.store().files().clone();
        match (method.as_str(), segments.as_slice()) {
            ("GET", ["health"]) => answer(json!({
                "version": env!("CARGO_PKG_VERSION"),
                "pid": std::process::id(),
                "images": self.images.count(),
            })),
            ("GET", ["metrics"]) => Ok(Answer::Text(METRICS.text(self.images.count()))),
            ("POST", ["shutdown"]) => {
                let shutdown = self.shutdown;
                std::thread::spawn(move || {
                    std::thread::sleep(TIME_TO_ANSWER);
                    shutdown();
                });
                Ok(Answer::Nothing)
            }
            ("GET", ["images"]) => answer(self.images.list()),
            ("GET", ["images", id]) => answer(self.images.get(id)?),
            ("PUT", ["images", id]) => {
                check_id(id)?;
                answer(self.images.open(id, parse::<OpenRequest>(body)?)?)
            }
            ("DELETE", ["images", id]) => nothing(self.images.close(id, discard(query)?)),
            ("POST", ["images", id, "complete"]) => {
                answer(self.images.complete(id, &parse::<Layers>(body)?.layers)?)
            }
            ("POST", ["images", id, "snapshot"]) => {
                let sealed = self.images.snapshot(id, &parse::<OneLayer>(body)?.layer)?;
                METRICS.snapshots.fetch_add(1, Ordering::Relaxed);
                answer(json!({
                    "path": sealed.path,
                    "size_bytes": sealed.size_bytes,
                    "live_bytes": sealed.live_bytes,
                    "uuid": sealed.uuid.to_string(),
                }))
            }
            ("POST", ["images", id, "flush"]) => nothing(self.images.flush(id)),
            ("POST", ["memory", "capture"]) => {
                let request: CaptureRequest = parse(body)?;
                check_paths([&request.layer])?;
                let [memory, pagemap] = <[OwnedFd; 2]>::try_from(descriptors).map_err(|got| {
                    let message = format!("{} descriptors came with the request, not 2", got.len());
                    Error::invalid(message)
                        .with_hint("pass /proc/PID/mem and /proc/PID/pagemap, in this order")
                })?;
                memory_layer(capture(files(), request, memory, pagemap)?)
            }
            ("POST", ["memory", "import"]) => {
                let request: DiffRequest = parse(body)?;
                check_paths(request.diff.iter().chain([&request.layer]))?;
                memory_layer(import_diff(files(), request, descriptors)?)
            }
            ("POST", ["layers", "import"]) => {
                let request: RawRequest = parse(body)?;
                check_paths(request.raw.iter().chain([&request.layer]))?;
                let (written, virtual_size) = import_raw(files(), request, descriptors)?;
                answer(json!({
                    "path": written.path,
                    "size_bytes": written.size_bytes,
                    "virtual_size": virtual_size,
                    "uuid": written.uuid.to_string(),
                }))
            }
            ("POST", ["layers", "compact"]) => {
                let request: CompactRequest = parse(body)?;
                check_paths(request.layers.iter().chain([&request.layer]))?;
                let done = compact(self.images.store(), &request)?;
                answer(json!({
                    "path": done.written.path,
                    "size_bytes": done.written.size_bytes,
                    "before_bytes": done.before_bytes,
                    "uuid": done.written.uuid.to_string(),
                }))
            }
            ("POST", ["layers", "sync"]) => {
                let Layers { layers } = parse(body)?;
                check_paths(&layers)?;
                nothing(
                    layers
                        .iter()
                        .try_for_each(|path| self.images.store().open(path)?.sync(&*files())),
                )
            }
            ("POST", ["layers", "verify"]) => {
                let OneLayer { layer } = parse(body)?;
                check_paths([&layer])?;
                let layer = self.images.store().open(&layer)?;
                answer(json!({
                    "virtual_size": layer.virtual_size,
                    "extents": layer.index.len(),
                    "data_bytes": layer.live_bytes(),
                    "uuid": layer.uuid.map(|uuid| uuid.to_string()),
                }))
            }
            _ => Err(Error::new(
                Code::NotFound,
                format!("no such operation: {method} {path}"),
            )),
        }
    }
}

fn memory_layer((written, copied): (Written, Copied)) -> Result<Answer> {
    METRICS.captures.fetch_add(1, Ordering::Relaxed);
    METRICS
        .captured_pages
        .fetch_add(copied.pages, Ordering::Relaxed);
    answer(json!({
        "path": written.path,
        "size_bytes": written.size_bytes,
        "pages": copied.pages,
        "zero_pages": copied.zero_pages,
        "uuid": written.uuid.to_string(),
    }))
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    serde_json::from_slice(body)
        .map_err(|error| Error::invalid(format!("the request's body: {error}")))
}

fn answer(value: impl Serialize) -> Result<Answer> {
    let value = serde_json::to_value(value)
        .map_err(|error| Error::new(Code::Io, format!("encode the answer: {error}")))?;
    Ok(Answer::Json(value))
}

fn nothing(done: Result<()>) -> Result<Answer> {
    done.map(|()| Answer::Nothing)
}

fn discard(query: &str) -> Result<bool> {
    match query {
        "" | "discard=0" => Ok(false),
        "discard=1" => Ok(true),
        _ => Err(Error::invalid(format!(
            "query {query:?}: only discard=1 is known"
        ))),
    }
}

fn check_id(id: &str) -> Result<()> {
    let fits = (1..=128).contains(&id.len())
        && id
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    if fits {
        Ok(())
    } else {
        Err(Error::invalid(
            "an image id is 1 to 128 letters, digits, '-', '_' and '.'",
        ))
    }
}

const fn status(code: Code) -> StatusCode {
    match code {
        Code::Invalid => StatusCode::BAD_REQUEST,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::Conflict => StatusCode::CONFLICT,
        Code::Corrupt => StatusCode::UNPROCESSABLE_ENTITY,
        Code::Io | Code::Terminal => StatusCode::INTERNAL_SERVER_ERROR,
        Code::NoSpace => StatusCode::INSUFFICIENT_STORAGE,
    }
}

fn respond(answer: Result<Answer>) -> Response<Full<Bytes>> {
    let (status, kind, body) = match answer {
        Ok(Answer::Nothing) => (StatusCode::NO_CONTENT, None, String::new()),
        Ok(Answer::Json(value)) => (StatusCode::OK, Some("application/json"), value.to_string()),
        Ok(Answer::Text(text)) => (StatusCode::OK, Some("text/plain; version=0.0.4"), text),
        Err(error) => {
            let body =
                json!({"code": error.code.name(), "message": error.message, "hint": error.hint});
            (
                status(error.code),
                Some("application/json"),
                body.to_string(),
            )
        }
    };
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    if let Some(kind) = kind {
        response
            .headers_mut()
            .insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    }
    response
}
