//! What a message may carry from one side to the other.

use std::net::IpAddr;

use hyper::header::{
    CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, Entry, HOST, HeaderMap, HeaderName, HeaderValue,
    TE, TRANSFER_ENCODING, UPGRADE,
};
use hyper::http::request::Parts;
use hyper::http::uri::PathAndQuery;
use hyper::{Uri, Version};

use crate::destination::{Malformed, PORT_HEADERS, SANDBOX_HEADERS};
use crate::guard::{ACCESS_TOKEN, TRAFFIC_TOKEN};

const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// For this hop only, whether or not `Connection` names them.
const HOP_BY_HOP: [HeaderName; 7] = [
    CONNECTION,
    TRANSFER_ENCODING,
    UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("proxy-authenticate"),
    HeaderName::from_static("proxy-authorization"),
];

/// What of a request's head is not for its receiver.
#[derive(Clone, Copy)]
pub enum Receiver {
    ControlPlane,
    Sandbox { envd: bool, by_headers: bool },
}

/// The host a request is for: the target's, which wins, or the `Host` field's.
pub fn host(head: &Parts) -> Result<Option<String>, Malformed> {
    if let Some(authority) = head.uri.authority() {
        return Ok(Some(
            authority
                .as_str()
                .rsplit('@')
                .next()
                .unwrap_or_default()
                .to_owned(),
        ));
    }
    let mut values = head.headers.get_all(HOST).iter();
    match (values.next(), values.next()) {
        (Some(host), None) => match host.to_str() {
            Ok(host) => Ok(Some(host.to_owned())),
            Err(_) => Err(Malformed("the Host header is malformed")),
        },
        (None, _) if head.version == Version::HTTP_10 => Ok(None),
        (None, _) => Err(Malformed("the Host header is missing")),
        (Some(_), Some(_)) => Err(Malformed("the Host header is there twice")),
    }
}

/// Refuses framing that someone else could understand otherwise.
pub fn check_framing(head: &Parts) -> Result<(), Malformed> {
    let mut codings = head.headers.get_all(TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => Ok(()),
        (Some(_), _) if head.headers.contains_key(CONTENT_LENGTH) => Err(Malformed(
            "Content-Length and Transfer-Encoding exclude each other",
        )),
        (Some(coding), None) if coding.as_bytes().eq_ignore_ascii_case(b"chunked") => Ok(()),
        _ => Err(Malformed("the transfer coding is not chunked")),
    }
}

/// The client wants another protocol on this connection.
pub fn asks_for_upgrade(head: &Parts) -> bool {
    head.version == Version::HTTP_11
        && head.headers.contains_key(UPGRADE)
        && connection_options(&head.headers).any(|option| option.eq_ignore_ascii_case("upgrade"))
}

/// Makes a client's head one of edge's own towards `receiver`: HTTP/1.1, target in origin form. The body's framing is the sender's business.
pub fn rewrite_request(head: &mut Parts, receiver: Receiver, host: Option<&str>, peer: IpAddr) {
    let upgrade = asks_for_upgrade(head)
        .then(|| head.headers.get(UPGRADE).cloned())
        .flatten();
    let wants_trailers = head
        .headers
        .get(TE)
        .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"trailers"));
    let headers = &mut head.headers;
    remove_hop_by_hop(headers);
    // A body is taken only once its receiver is connected; the client's server half says 100 Continue then.
    [TE, EXPECT, CONTENT_LENGTH]
        .iter()
        .for_each(|name| drop(headers.remove(name)));
    if wants_trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    if let Receiver::Sandbox { envd, by_headers } = receiver {
        headers.remove(API_KEY);
        headers.remove(TRAFFIC_TOKEN);
        if !envd {
            headers.remove(ACCESS_TOKEN);
        }
        if by_headers {
            SANDBOX_HEADERS
                .iter()
                .chain(&PORT_HEADERS)
                .for_each(|name| drop(headers.remove(name)));
        }
    }
    if head.version == Version::HTTP_2 {
        join_cookies(headers);
    }
    if let Some(protocol) = upgrade {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, protocol);
    }
    set_forwarded(headers, host, peer);
    // HTTP/1.0 may do without a host, HTTP/1.1 not.
    headers.insert(
        HOST,
        host.and_then(|host| HeaderValue::from_str(host).ok())
            .unwrap_or(HeaderValue::from_static("")),
    );
    head.version = Version::HTTP_11;
    head.uri = Uri::from(
        head.uri
            .path_and_query()
            .cloned()
            .unwrap_or_else(|| PathAndQuery::from_static("/")),
    );
    head.extensions.clear();
}

/// Makes an upstream's head edge's own; `upgraded` keeps the agreement on another protocol.
pub fn rewrite_response(headers: &mut HeaderMap, upgraded: bool) {
    let protocol = if upgraded {
        headers.remove(UPGRADE)
    } else {
        None
    };
    if headers.contains_key(TRANSFER_ENCODING) {
        headers.remove(CONTENT_LENGTH);
    }
    remove_hop_by_hop(headers);
    if upgraded {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    }
    if let Some(protocol) = protocol {
        headers.insert(UPGRADE, protocol);
    }
}

fn connection_options(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
}

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = connection_options(headers)
        .filter_map(|option| option.parse().ok())
        .collect();
    // Nobody can declare away what a message cannot be understood without.
    let essential = |name: &HeaderName| *name == HOST || *name == CONTENT_LENGTH;
    named
        .iter()
        .filter(|name| !essential(name))
        .chain(&HOP_BY_HOP)
        .for_each(|name| drop(headers.remove(name)));
}

/// HTTP/2 may split `Cookie`; HTTP/1.1 may not.
fn join_cookies(headers: &mut HeaderMap) {
    let Entry::Occupied(cookies) = headers.entry(COOKIE) else {
        return;
    };
    let all: Vec<&[u8]> = cookies.iter().map(HeaderValue::as_bytes).collect();
    if all.len() > 1
        && let Ok(joined) = HeaderValue::from_bytes(&all.join(&b"; "[..]))
    {
        headers.insert(COOKIE, joined);
    }
}

/// Appends the peer to the chain. Protocol and host are what the first proxy saw: edge speaks plain HTTP and may stand behind TLS.
fn set_forwarded(headers: &mut HeaderMap, host: Option<&str>, peer: IpAddr) {
    let before = headers
        .get_all(FORWARDED_FOR)
        .iter()
        .filter_map(|value| value.to_str().ok());
    let chain: Vec<String> = before
        .map(str::to_owned)
        .chain([peer.to_canonical().to_string()])
        .collect();
    if let Ok(chain) = HeaderValue::from_str(&chain.join(", ")) {
        headers.insert(FORWARDED_FOR, chain);
    }
    headers
        .entry(FORWARDED_PROTO)
        .or_insert(HeaderValue::from_static("http"));
    if let Some(host) = host.and_then(|host| HeaderValue::from_str(host).ok()) {
        headers.entry(FORWARDED_HOST).or_insert(host);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(version: Version, uri: &str, pairs: &[(&'static str, &str)]) -> Parts {
        let mut head = hyper::Request::builder()
            .version(version)
            .uri(uri)
            .body(())
            .unwrap()
            .into_parts()
            .0;
        for (name, value) in pairs {
            head.headers.append(*name, value.parse().unwrap());
        }
        head
    }

    fn rewritten(
        receiver: Receiver,
        version: Version,
        pairs: &[(&'static str, &str)],
    ) -> Vec<String> {
        let mut head = head(version, "/x?y", pairs);
        rewrite_request(
            &mut head,
            receiver,
            Some("h:1"),
            "192.0.2.7".parse().unwrap(),
        );
        head.headers
            .iter()
            .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
            .collect()
    }

    const ADDED: [&str; 4] = [
        "x-forwarded-for: 192.0.2.7",
        "x-forwarded-proto: http",
        "x-forwarded-host: h:1",
        "host: h:1",
    ];
    const SECRETS: [(&str, &str); 5] = [
        ("x-api-key", "k"),
        ("x-access-token", "a"),
        ("e2b-traffic-access-token", "t"),
        ("e2b-sandbox-id", "i"),
        ("x-agentenv-target-port", "1"),
    ];

    fn same(mut got: Vec<String>, wanted: &[&str]) {
        let mut wanted: Vec<String> = wanted
            .iter()
            .chain(&ADDED)
            .map(|line| (*line).to_owned())
            .collect();
        got.sort();
        wanted.sort();
        assert_eq!(got, wanted);
    }

    #[test]
    fn secrets_reach_only_those_they_are_for() {
        let ask = |receiver| rewritten(receiver, Version::HTTP_11, &SECRETS);
        same(
            ask(Receiver::Sandbox {
                envd: true,
                by_headers: true,
            }),
            &["x-access-token: a"],
        );
        same(
            ask(Receiver::Sandbox {
                envd: false,
                by_headers: false,
            }),
            &["e2b-sandbox-id: i", "x-agentenv-target-port: 1"],
        );
        let all = SECRETS.map(|(name, value)| format!("{name}: {value}"));
        same(
            ask(Receiver::ControlPlane),
            &all.each_ref().map(String::as_str),
        );
    }

    #[test]
    fn hop_by_hop_fields_stay_behind() {
        let pairs = [
            ("connection", "close, x-mine"),
            ("connection", "Host, te"),
            ("x-mine", "1"),
            ("keep-alive", "1"),
            ("te", "trailers"),
            ("proxy-authorization", "p"),
            ("transfer-encoding", "chunked"),
            ("expect", "100-continue"),
            ("upgrade", "websocket"),
            ("authorization", "Basic x"),
        ];
        same(
            rewritten(Receiver::ControlPlane, Version::HTTP_11, &pairs),
            &["te: trailers", "authorization: Basic x"],
        );
    }

    #[test]
    fn upgrades_only_in_http_1_1() {
        let pairs = [
            ("connection", "keep-alive, Upgrade"),
            ("upgrade", "websocket"),
        ];
        same(
            rewritten(Receiver::ControlPlane, Version::HTTP_11, &pairs),
            &["connection: upgrade", "upgrade: websocket"],
        );
        same(
            rewritten(Receiver::ControlPlane, Version::HTTP_10, &pairs),
            &[],
        );
    }

    #[test]
    fn what_an_earlier_proxy_said_stays() {
        let pairs = [
            ("x-forwarded-for", "203.0.113.9"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "first"),
        ];
        let mut lines = rewritten(Receiver::ControlPlane, Version::HTTP_11, &pairs);
        lines.sort();
        let wanted = [
            "host: h:1",
            "x-forwarded-for: 203.0.113.9, 192.0.2.7",
            "x-forwarded-host: first",
            "x-forwarded-proto: https",
        ];
        assert_eq!(lines, wanted);
    }

    #[test]
    fn cookies_are_joined() {
        let pairs = [("cookie", "a=1"), ("cookie", "b=2")];
        same(
            rewritten(Receiver::ControlPlane, Version::HTTP_2, &pairs),
            &["cookie: a=1; b=2"],
        );
    }

    #[test]
    fn the_host_is_clear_or_refused() {
        let of =
            |uri: &str, pairs: &[(&'static str, &str)]| host(&head(Version::HTTP_11, uri, pairs));
        assert_eq!(of("/", &[("host", "a")]), Ok(Some("a".into())));
        assert_eq!(
            of("http://u@b:1/", &[("host", "a")]),
            Ok(Some("b:1".into()))
        );
        assert!(of("/", &[]).is_err());
        assert!(of("/", &[("host", "a"), ("host", "a")]).is_err());
        assert_eq!(host(&head(Version::HTTP_10, "/", &[])), Ok(None));
    }

    #[test]
    fn framing_is_clear_or_refused() {
        let check =
            |pairs: &[(&'static str, &str)]| check_framing(&head(Version::HTTP_11, "/", pairs));
        assert_eq!(check(&[("transfer-encoding", "Chunked")]), Ok(()));
        assert_eq!(check(&[("content-length", "1")]), Ok(()));
        assert!(check(&[("transfer-encoding", "gzip, chunked")]).is_err());
        assert!(
            check(&[
                ("transfer-encoding", "chunked"),
                ("transfer-encoding", "chunked")
            ])
            .is_err()
        );
        assert!(check(&[("transfer-encoding", "chunked"), ("content-length", "1")]).is_err());
    }

    #[test]
    fn responses() {
        let mut headers: HeaderMap = head(
            Version::HTTP_11,
            "/",
            &[
                ("transfer-encoding", "chunked"),
                ("content-length", "9"),
                ("connection", "x-a"),
                ("x-a", "1"),
                ("upgrade", "w"),
                ("etag", "e"),
            ],
        )
        .headers;
        rewrite_response(&mut headers, false);
        assert_eq!(
            headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(),
            ["etag"]
        );
    }
}
