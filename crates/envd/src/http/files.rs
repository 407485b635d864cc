//! `GET` and `POST /files`: whole files, streamed at constant memory.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{FromRequest, Multipart, Query, Request, State};
use axum::http::header::{
    ACCEPT_ENCODING, ACCEPT_RANGES, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE,
    RANGE, VARY,
};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use serde::{Deserialize, Serialize};

use super::auth;
use super::error::HttpError;
use crate::environment;
use crate::filesystem::reading::{self, Readable};
use crate::filesystem::writing::{Encoding, Writer};
use crate::state::{Agent, blocking};
use crate::users::User;

#[derive(Deserialize)]
pub struct Parameters {
    #[serde(default)]
    path: String,
    username: Option<String>,
    signature: Option<String>,
}

#[derive(Serialize)]
struct Written {
    path: String,
    name: String,
    r#type: &'static str,
}

async fn user(agent: &Arc<Agent>, name: Option<String>) -> Result<User, HttpError> {
    let agent = agent.clone();
    let found = blocking(move || agent.user(name.as_deref())).await?;
    found.map_err(|name| HttpError::unauthorized(format!("invalid username: '{name}'")))
}

/// The file's bytes, or the range asked for.
pub async fn download(
    State(agent): State<Arc<Agent>>,
    Query(parameters): Query<Parameters>,
    headers: HeaderMap,
) -> Result<Response, HttpError> {
    auth::check_files(&agent, &headers, parameters.signature.as_deref())?;
    if !accepts_identity(&headers) {
        return Err(HttpError::new(
            StatusCode::NOT_ACCEPTABLE,
            "only the identity encoding is offered",
        ));
    }
    let user = user(&agent, parameters.username).await?;
    let path = environment::resolve(
        &parameters.path,
        &user,
        agent.settings().default_workdir.as_deref(),
    );
    let name = path.display().to_string();
    let opened = blocking(move || reading::open(&path)).await?;
    let file = opened.map_err(|error| HttpError::file(&name, &error))?;
    let mut response = match ask_range(&headers, &file) {
        Asked::Everything => {
            let length = file.length;
            let mut response = Body::from_stream(file.stream(0, None)).into_response();
            if let Some(length) = length {
                response.headers_mut().insert(CONTENT_LENGTH, length.into());
            }
            response
        }
        Asked::Range { start, end, length } => {
            let mut response =
                Body::from_stream(file.stream(start, Some(end + 1 - start))).into_response();
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            response
                .headers_mut()
                .insert(CONTENT_LENGTH, (end + 1 - start).into());
            let range = format!("bytes {start}-{end}/{length}");
            response
                .headers_mut()
                .insert(CONTENT_RANGE, header(&range)?);
            response
        }
        Asked::Impossible { length } => {
            let mut response =
                HttpError::new(StatusCode::RANGE_NOT_SATISFIABLE, "range beyond the end")
                    .into_response();
            response
                .headers_mut()
                .insert(CONTENT_RANGE, header(&format!("bytes */{length}"))?);
            return Ok(response);
        }
    };
    for (name, value) in [
        (CONTENT_TYPE, "application/octet-stream"),
        (ACCEPT_RANGES, "bytes"),
        (VARY, "Accept-Encoding"),
    ] {
        response
            .headers_mut()
            .insert(name, axum::http::HeaderValue::from_static(value));
    }
    Ok(response)
}

fn header(text: &str) -> Result<axum::http::HeaderValue, HttpError> {
    text.parse()
        .map_err(|_| HttpError::internal(format!("not a header value: {text}")))
}

/// Identity is always acceptable unless it, or everything, is ruled out by a weight of zero.
fn accepts_identity(headers: &HeaderMap) -> bool {
    let Some(accepted) = headers
        .get(ACCEPT_ENCODING)
        .and_then(|value| value.to_str().ok())
    else {
        return true;
    };
    let weights: Vec<(&str, bool)> = accepted
        .split(',')
        .map(|entry| {
            let mut parts = entry.split(';').map(str::trim);
            let coding = parts.next().unwrap_or_default();
            let weight = parts.find_map(|part| part.strip_prefix("q=")?.parse::<f32>().ok());
            (coding, weight != Some(0.0))
        })
        .collect();
    let weight_of = |wanted| {
        weights
            .iter()
            .find(|(coding, _)| *coding == wanted)
            .map(|(_, allowed)| *allowed)
    };
    weight_of("identity")
        .or_else(|| weight_of("*"))
        .unwrap_or(true)
}

#[derive(Debug, PartialEq, Eq)]
enum Asked {
    Everything,
    /// Both ends included.
    Range {
        start: u64,
        end: u64,
        length: u64,
    },
    Impossible {
        length: u64,
    },
}

fn ask_range(headers: &HeaderMap, file: &Readable) -> Asked {
    let range = headers.get(RANGE).and_then(|value| value.to_str().ok());
    match (range, file.length) {
        (Some(range), Some(length)) => parse_range(range, length),
        _ => Asked::Everything,
    }
}

/// One byte range; several, or what is no range at all, get the whole file, as the standard allows.
fn parse_range(range: &str, length: u64) -> Asked {
    let Some((first, last)) = range
        .strip_prefix("bytes=")
        .and_then(|range| range.split_once('-'))
    else {
        return Asked::Everything;
    };
    let number = |text: &str| text.trim().parse::<u64>().ok();
    let (start, end) = match (number(first), number(last)) {
        (Some(start), Some(end)) if start <= end => (start, end.min(length.saturating_sub(1))),
        (Some(start), None) if last.trim().is_empty() => (start, length.saturating_sub(1)),
        (None, Some(0)) if first.trim().is_empty() => return Asked::Impossible { length },
        (None, Some(count)) if first.trim().is_empty() => {
            (length.saturating_sub(count), length.saturating_sub(1))
        }
        _ => return Asked::Everything,
    };
    if start >= length {
        Asked::Impossible { length }
    } else {
        Asked::Range { start, end, length }
    }
}

/// Writes one file from an octet stream, or several from a form.
pub async fn upload(
    State(agent): State<Arc<Agent>>,
    Query(parameters): Query<Parameters>,
    request: Request,
) -> Result<Response, HttpError> {
    let headers = request.headers();
    auth::check_files(&agent, headers, parameters.signature.as_deref())?;
    if headers
        .keys()
        .any(|name| name.as_str().starts_with("x-metadata-"))
    {
        return Err(HttpError::unimplemented("file metadata is not supported"));
    }
    let encoding = encoding(headers)?;
    let content_type = headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    let form = content_type.starts_with("multipart/form-data");
    if !form && !content_type.starts_with("application/octet-stream") {
        let message = format!("unsupported content type '{content_type}'");
        return Err(HttpError::bad_request(message));
    }
    let user = user(&agent, parameters.username).await?;
    let mut destination = Destination {
        user,
        default_path: parameters.path,
        seen: HashSet::new(),
        agent,
    };
    let written = if form {
        upload_form(request, &mut destination, encoding).await?
    } else {
        if destination.default_path.is_empty() {
            return Err(HttpError::bad_request(
                "the path query parameter is required".into(),
            ));
        }
        let path = destination.claim(None)?;
        let content = request.into_body().into_data_stream();
        vec![write(path, destination.user.clone(), encoding, content).await?]
    };
    Ok(Json(written).into_response())
}

fn encoding(headers: &HeaderMap) -> Result<Encoding, HttpError> {
    match headers.get(CONTENT_ENCODING).map(|value| value.as_bytes()) {
        None | Some(b"" | b"identity") => Ok(Encoding::Identity),
        Some(b"gzip") => Ok(Encoding::Gzip),
        Some(_) => Err(HttpError::bad_request(
            "unsupported content encoding: identity and gzip are known".into(),
        )),
    }
}

/// Where the parts of one request go.
struct Destination {
    agent: Arc<Agent>,
    user: User,
    default_path: String,
    seen: HashSet<PathBuf>,
}

impl Destination {
    /// The path of the next file: that of the query, else the part's own name, which may hold slashes.
    fn claim(&mut self, file_name: Option<&str>) -> Result<PathBuf, HttpError> {
        let named = if self.default_path.is_empty() {
            file_name.unwrap_or_default()
        } else {
            &self.default_path
        };
        if named.is_empty() {
            return Err(HttpError::bad_request(
                "a file needs a path: in the query, or as the part's file name".into(),
            ));
        }
        let path = environment::resolve(
            named,
            &self.user,
            self.agent.settings().default_workdir.as_deref(),
        );
        if !self.seen.insert(path.clone()) {
            return Err(HttpError::bad_request(format!(
                "{}: named twice in one request",
                path.display()
            )));
        }
        Ok(path)
    }
}

async fn upload_form(
    request: Request,
    destination: &mut Destination,
    encoding: Encoding,
) -> Result<Vec<Written>, HttpError> {
    let broken =
        |error: &dyn std::fmt::Display| HttpError::bad_request(format!("malformed form: {error}"));
    let mut form = Multipart::from_request(request, &())
        .await
        .map_err(|error| broken(&error))?;
    let mut written = Vec::new();
    while let Some(part) = form.next_field().await.map_err(|error| broken(&error))? {
        if part.name() != Some("file") {
            continue;
        }
        let path = destination.claim(part.file_name())?;
        written.push(write(path, destination.user.clone(), encoding, part).await?);
    }
    if written.is_empty() {
        return Err(HttpError::bad_request(
            "the form has no part named 'file'".into(),
        ));
    }
    Ok(written)
}

async fn write<E: std::fmt::Display>(
    path: PathBuf,
    user: User,
    encoding: Encoding,
    mut content: impl Stream<Item = Result<Bytes, E>> + Unpin,
) -> Result<Written, HttpError> {
    let name = path.display().to_string();
    let failed = |error: &std::io::Error| HttpError::file(&name, error);
    let mut writer = Writer::create(path.clone(), user, encoding);
    while let Some(chunk) = content.next().await {
        let chunk = chunk.map_err(|error| {
            HttpError::bad_request(format!("{name}: the upload broke off: {error}"))
        })?;
        if !writer.write(chunk).await {
            break;
        }
    }
    writer.finish().await.map_err(|error| failed(&error))?;
    let file_name = path
        .file_name()
        .map(|name| name.to_string_lossy().into_owned());
    Ok(Written {
        name: file_name.unwrap_or_default(),
        path: name,
        r#type: "file",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_clipped_to_the_file() {
        let cases = [
            (
                "bytes=0-3",
                Asked::Range {
                    start: 0,
                    end: 3,
                    length: 10,
                },
            ),
            (
                "bytes=8-99",
                Asked::Range {
                    start: 8,
                    end: 9,
                    length: 10,
                },
            ),
            (
                "bytes=4-",
                Asked::Range {
                    start: 4,
                    end: 9,
                    length: 10,
                },
            ),
            (
                "bytes=-3",
                Asked::Range {
                    start: 7,
                    end: 9,
                    length: 10,
                },
            ),
            (
                "bytes=-99",
                Asked::Range {
                    start: 0,
                    end: 9,
                    length: 10,
                },
            ),
            ("bytes=10-", Asked::Impossible { length: 10 }),
            ("bytes=-0", Asked::Impossible { length: 10 }),
            ("bytes=3-1", Asked::Everything),
            ("bytes=0-1,4-5", Asked::Everything),
            ("lines=0-1", Asked::Everything),
            ("bytes=x", Asked::Everything),
        ];
        for (range, expected) in cases {
            assert_eq!(parse_range(range, 10), expected, "{range}");
        }
        assert_eq!(parse_range("bytes=0-", 0), Asked::Impossible { length: 0 });
    }

    #[test]
    fn identity_can_be_ruled_out() {
        let accepts = |value: &str| {
            accepts_identity(&HeaderMap::from_iter([(
                ACCEPT_ENCODING,
                value.parse().unwrap(),
            )]))
        };
        assert!(accepts_identity(&HeaderMap::new()));
        assert!(accepts("gzip"));
        assert!(accepts("gzip, identity;q=0.1"));
        assert!(accepts("*;q=0, identity"));
        assert!(!accepts("gzip, identity;q=0"));
        assert!(!accepts("gzip, *;q=0"));
    }
}
