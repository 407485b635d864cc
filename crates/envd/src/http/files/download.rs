//! `GET /files`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Query, State};
use axum::http::header::{
    ACCEPT_ENCODING, ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, RANGE, VARY,
};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};

use super::{Parameters, user};
use crate::environment;
use crate::filesystem::reading::{self, Readable};
use crate::http::auth;
use crate::http::error::HttpError;
use crate::state::{Agent, blocking};

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
            .insert(name, HeaderValue::from_static(value));
    }
    Ok(response)
}

fn header(text: &str) -> Result<HeaderValue, HttpError> {
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
