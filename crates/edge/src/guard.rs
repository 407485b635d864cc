//! Who may pass to a sandbox. Pure; the tokens are the route's.

use hyper::header::HeaderName;
use hyper::{HeaderMap, Method};

use crate::routes::{RouteSpec, Token};

pub const ACCESS_TOKEN: HeaderName = HeaderName::from_static("x-access-token");
pub const TRAFFIC_TOKEN: HeaderName = HeaderName::from_static("e2b-traffic-access-token");

/// Calls between a node and its guest agent, never for the public.
const CONTROL_CALLS: [&str; 6] = [
    "init", "freeze", "unfreeze", "fsfreeze", "fsthaw", "collapse",
];

#[derive(Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The path belongs to the control plane: as if it did not exist.
    ControlCall,
    AccessToken,
    TrafficToken,
}

pub fn check(
    route: &RouteSpec,
    port: u16,
    method: &Method,
    path: &str,
    headers: &HeaderMap,
) -> Result<(), Refusal> {
    if port != route.envd_port {
        return held(headers, &TRAFFIC_TOKEN, route.traffic_token.as_ref())
            .ok_or(Refusal::TrafficToken);
    }
    if is_control_call(path) {
        return Err(Refusal::ControlCall);
    }
    // Signed URLs carry their proof in the query, which only envd can check.
    if path == "/files" || (path == "/health" && method == Method::GET) {
        return Ok(());
    }
    held(headers, &ACCESS_TOKEN, route.access_token.as_ref()).ok_or(Refusal::AccessToken)
}

/// Some when nothing is demanded, or exactly one value is there and is the right one.
fn held(headers: &HeaderMap, name: &HeaderName, demanded: Option<&Token>) -> Option<()> {
    let Some(token) = demanded else {
        return Some(());
    };
    let mut values = headers.get_all(name).iter();
    let value = values.next()?;
    (values.next().is_none() && token.matches(value.as_bytes())).then_some(())
}

/// Also in any spelling a lenient server could take for it: percent-encoded, in other case, with dots or slashes added.
fn is_control_call(path: &str) -> bool {
    let decoded = percent_decoded(path).to_ascii_lowercase();
    let mut segments: Vec<&[u8]> = Vec::new();
    for segment in decoded.split(|byte| *byte == b'/') {
        match segment {
            b"" | b"." => {}
            b".." => drop(segments.pop()),
            other => segments.push(other),
        }
    }
    matches!(segments[..], [only] if CONTROL_CALLS.iter().any(|call| call.as_bytes() == only))
}

fn percent_decoded(path: &str) -> Vec<u8> {
    let mut rest = path.as_bytes();
    let mut decoded = Vec::with_capacity(rest.len());
    while let Some((&byte, tail)) = rest.split_first() {
        let escape = tail
            .get(..2)
            .filter(|_| byte == b'%')
            .and_then(|hex| std::str::from_utf8(hex).ok());
        match escape.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(value) => (decoded.push(value), rest = &tail[2..]),
            None => (decoded.push(byte), rest = tail),
        };
    }
    decoded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(access: Option<&str>, traffic: Option<&str>) -> RouteSpec {
        let json = serde_json::json!({
            "generation": 1, "state": "running", "address": "127.0.0.1", "envd_port": 49983,
            "access_token": access, "traffic_token": traffic,
        });
        serde_json::from_value(json).unwrap()
    }

    fn ask(
        route: &RouteSpec,
        port: u16,
        path: &str,
        header: Option<(HeaderName, &str)>,
    ) -> Result<(), Refusal> {
        let headers = header
            .map(|(name, value)| (name, value.parse().unwrap()))
            .into_iter()
            .collect();
        check(route, port, &Method::GET, path, &headers)
    }

    #[test]
    fn tokens() {
        let guarded = route(Some("secret"), Some("traffic"));
        for wrong in [
            None,
            Some((ACCESS_TOKEN, "Secret")),
            Some((ACCESS_TOKEN, "secret ")),
            Some((ACCESS_TOKEN, "secre")),
        ] {
            assert_eq!(
                ask(&guarded, 49983, "/metrics", wrong),
                Err(Refusal::AccessToken)
            );
        }
        assert_eq!(
            ask(&guarded, 49983, "/metrics", Some((ACCESS_TOKEN, "secret"))),
            Ok(())
        );
        assert_eq!(
            ask(&guarded, 80, "/", Some((ACCESS_TOKEN, "secret"))),
            Err(Refusal::TrafficToken)
        );
        assert_eq!(
            ask(&guarded, 80, "/", Some((TRAFFIC_TOKEN, "traffic"))),
            Ok(())
        );
        assert_eq!(
            ask(
                &guarded,
                49983,
                "/metrics",
                Some((TRAFFIC_TOKEN, "traffic"))
            ),
            Err(Refusal::AccessToken)
        );
        let open = route(None, None);
        assert_eq!(ask(&open, 49983, "/metrics", None), Ok(()));
        assert_eq!(ask(&open, 80, "/", None), Ok(()));

        let mut headers = HeaderMap::new();
        for value in ["secret", "x"] {
            headers.append(ACCESS_TOKEN, value.parse().unwrap());
        }
        assert_eq!(
            check(&guarded, 49983, &Method::GET, "/", &headers),
            Err(Refusal::AccessToken)
        );
    }

    #[test]
    fn what_passes_without_a_token() {
        let guarded = route(Some("secret"), None);
        assert_eq!(ask(&guarded, 49983, "/health", None), Ok(()));
        assert_eq!(ask(&guarded, 49983, "/files", None), Ok(()));
        for path in [
            "/files/", "/files/x", "//files", "/Files", "/health/", "/healthz",
        ] {
            assert_eq!(
                ask(&guarded, 49983, path, None),
                Err(Refusal::AccessToken),
                "{path}"
            );
        }
        let posted = check(&guarded, 49983, &Method::POST, "/health", &HeaderMap::new());
        assert_eq!(posted, Err(Refusal::AccessToken));
    }

    #[test]
    fn control_calls_are_hidden() {
        let open = route(None, None);
        let spellings = [
            "/init",
            "/init/",
            "//init",
            "/./init",
            "/a/../init",
            "/%69nit",
            "/INIT",
            "/%2e/init",
            "/%2Finit",
            "/collapse",
        ];
        for path in spellings {
            assert_eq!(
                ask(&open, 49983, path, None),
                Err(Refusal::ControlCall),
                "{path}"
            );
            assert_eq!(
                ask(&open, 8080, path, None),
                Ok(()),
                "another port's paths are the guest's: {path}"
            );
        }
        for path in ["/", "/initial", "/a/init", "/init/x", "/%", "/%6", "/%zz"] {
            assert_eq!(ask(&open, 49983, path, None), Ok(()), "{path}");
        }
    }
}
