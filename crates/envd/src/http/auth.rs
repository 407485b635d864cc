//! Who calls: the sandbox's token, and the user a request names.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::error::HttpError;
use crate::state::Agent;

const TOKEN: &str = "x-access-token";

/// Lets a request pass when it carries the sandbox's token, or the sandbox has none.
pub async fn demand_token(
    State(agent): State<Arc<Agent>>,
    request: Request,
    next: Next,
) -> Response {
    match presented(&agent, request.headers()) {
        Token::NotNeeded | Token::Right => next.run(request).await,
        Token::Wrong | Token::Absent => {
            HttpError::unauthorized("unauthorized: the access token is missing or wrong")
                .into_response()
        }
    }
}

/// `/files` takes the token or a signed URL; the latter is not supported.
pub fn check_files(
    agent: &Agent,
    headers: &HeaderMap,
    signature: Option<&str>,
) -> Result<(), HttpError> {
    match (presented(agent, headers), signature) {
        (Token::NotNeeded | Token::Right, _) => Ok(()),
        (Token::Wrong, _) => Err(HttpError::unauthorized(
            "access token present in header but does not match",
        )),
        (Token::Absent, None) => Err(HttpError::unauthorized("missing signature query parameter")),
        (Token::Absent, Some(_)) => Err(HttpError::unimplemented("signed URLs are not supported")),
    }
}

enum Token {
    NotNeeded,
    Right,
    Wrong,
    Absent,
}

fn presented(agent: &Agent, headers: &HeaderMap) -> Token {
    let settings = agent.settings();
    match (&settings.access_token, headers.get(TOKEN)) {
        (None, _) => Token::NotNeeded,
        (Some(_), None) => Token::Absent,
        (Some(token), Some(presented)) if equal(token.as_bytes(), presented.as_bytes()) => {
            Token::Right
        }
        (Some(_), Some(_)) => Token::Wrong,
    }
}

/// Takes the same time wherever they differ.
fn equal(one: &[u8], other: &[u8]) -> bool {
    one.len() == other.len()
        && one
            .iter()
            .zip(other)
            .fold(0, |difference, (a, b)| difference | (a ^ b))
            == 0
}

/// The user a request names in `Authorization: Basic`; the password is of no interest.
pub fn username(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, credentials) = value.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = String::from_utf8(STANDARD.decode(credentials.trim()).ok()?).ok()?;
    // The last colon: a name may be `uid:gid`, the password is empty.
    let name = decoded
        .rsplit_once(':')
        .map_or(decoded.as_str(), |(name, _)| name);
    Some(name.to_owned()).filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(header: &str) -> Option<String> {
        let mut headers = HeaderMap::new();
        headers.insert(AUTHORIZATION, header.parse().unwrap());
        username(&headers)
    }

    #[test]
    fn the_user_is_the_name_of_basic_credentials() {
        assert_eq!(
            named(&format!("Basic {}", STANDARD.encode("root:"))).as_deref(),
            Some("root")
        );
        assert_eq!(
            named(&format!("basic {}", STANDARD.encode("1000:1000:"))).as_deref(),
            Some("1000:1000")
        );
        for strange in [
            "Bearer x",
            "Basic",
            "Basic !!!",
            &format!("Basic {}", STANDARD.encode(":")),
        ] {
            assert_eq!(named(strange), None, "{strange}");
        }
    }

    #[test]
    fn tokens_compare_by_content() {
        assert!(equal(b"abc", b"abc"));
        assert!(!equal(b"abc", b"abd"));
        assert!(!equal(b"abc", b"ab"));
    }
}
