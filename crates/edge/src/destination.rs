//! Whom a request is for. Pure: names and numbers in, a decision out; whether the sandbox exists is the route table's business.

use hyper::HeaderMap;
use hyper::header::{HeaderName, HeaderValue};

/// Each field's native name, which wins, and the SDK's.
pub const SANDBOX_HEADERS: [HeaderName; 2] = [
    HeaderName::from_static("x-agentenv-sandbox-id"),
    HeaderName::from_static("e2b-sandbox-id"),
];
pub const PORT_HEADERS: [HeaderName; 2] = [
    HeaderName::from_static("x-agentenv-target-port"),
    HeaderName::from_static("e2b-sandbox-port"),
];

const LONGEST_ID: usize = 64;

#[derive(Debug, PartialEq, Eq)]
pub enum Destination {
    ControlPlane,
    Sandbox {
        id: String,
        port: u16,
        /// The routing headers decided, so they have done their work and go no further.
        by_headers: bool,
    },
}

/// What is wrong with a request that names a sandbox; shown to the client.
#[derive(Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

/// Decides by the host label `{port}-{sandboxID}.{domain}`, else by headers, else it is the control plane's.
///
/// `domains` are lower case, without a port or a dot at either end.
pub fn decide(
    host: Option<&str>,
    headers: &HeaderMap,
    domains: &[String],
) -> Result<Destination, Malformed> {
    if let Some(destination) = host.and_then(|host| by_host(host, domains)) {
        return destination;
    }
    let id = one_of(headers, &SANDBOX_HEADERS)?;
    let port = one_of(headers, &PORT_HEADERS)?;
    match (id, port) {
        (None, None) => Ok(Destination::ControlPlane),
        (Some(id), Some(port)) => {
            let text = |value: &HeaderValue| {
                value
                    .to_str()
                    .map(str::to_ascii_lowercase)
                    .unwrap_or_default()
            };
            Ok(Destination::Sandbox {
                id: sandbox_id(&text(id))?,
                port: port_number(&text(port))?,
                by_headers: true,
            })
        }
        (Some(_), None) => Err(Malformed("a sandbox ID header without a port header")),
        (None, Some(_)) => Err(Malformed("a sandbox port header without an ID header")),
    }
}

/// None when the host is not a sandbox's: another domain, a deeper name, or a label that does not start with a number.
fn by_host(host: &str, domains: &[String]) -> Option<Result<Destination, Malformed>> {
    let host = without_port(host)
        .trim_end_matches('.')
        .to_ascii_lowercase();
    let label = domains
        .iter()
        .find_map(|domain| host.strip_suffix(domain.as_str())?.strip_suffix('.'))?;
    let (port, id) = label.split_once('-')?;
    if label.contains('.') || port.is_empty() || !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let parse = || {
        Ok(Destination::Sandbox {
            port: port_number(port)?,
            id: sandbox_id(id)?,
            by_headers: false,
        })
    };
    Some(parse())
}

/// A host as in `Host` or `--domain`, without the port that may follow it.
pub fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

/// The value of the first name that is there. Two values of one name have no meaning that everyone behind us shares.
fn one_of<'a>(
    headers: &'a HeaderMap,
    names: &[HeaderName; 2],
) -> Result<Option<&'a HeaderValue>, Malformed> {
    let mut found = None;
    for name in names {
        let mut values = headers.get_all(name).iter();
        let first = values.next();
        if values.next().is_some() {
            return Err(Malformed("a routing header is there twice"));
        }
        found = found.or(first);
    }
    Ok(found)
}

fn sandbox_id(text: &str) -> Result<String, Malformed> {
    let fits = (1..=LONGEST_ID).contains(&text.len())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
    fits.then(|| text.to_owned())
        .ok_or(Malformed("the sandbox ID is malformed"))
}

fn port_number(text: &str) -> Result<u16, Malformed> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
    text.parse().ok().filter(|_| digits).ok_or(Malformed(
        "the sandbox port is not a number from 1 to 65535",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in pairs {
            map.append(*name, HeaderValue::from_str(value).unwrap());
        }
        map
    }

    fn at(host: &str, pairs: &[(&'static str, &str)]) -> Result<Destination, Malformed> {
        decide(
            Some(host),
            &headers(pairs),
            &["sbx.test".into(), "b.example".into()],
        )
    }

    fn sandbox(id: &str, port: u16, by_headers: bool) -> Result<Destination, Malformed> {
        Ok(Destination::Sandbox {
            id: id.into(),
            port,
            by_headers,
        })
    }

    const PAIR: [(&str, &str); 2] = [("e2b-sandbox-id", "iother"), ("e2b-sandbox-port", "9")];

    #[test]
    fn host_labels() {
        assert_eq!(
            at("49983-iabc.sbx.test", &[]),
            sandbox("iabc", 49983, false)
        );
        assert_eq!(at("1-IABC.SBX.Test.:8443", &[]), sandbox("iabc", 1, false));
        assert_eq!(
            at("65535-iabc.b.example", &PAIR),
            sandbox("iabc", 65535, false),
            "the host wins"
        );
        for host in [
            "0-iabc",
            "65536-iabc",
            "080-iabc",
            "99999999999-iabc",
            "80-",
            "80-i-b",
            "80-i%41",
        ] {
            assert!(at(&format!("{host}.sbx.test"), &PAIR).is_err(), "{host}");
        }
        for host in [
            "sbx.test",
            "api.sbx.test",
            "a-b.sbx.test",
            "-iabc.sbx.test",
            "80-iabc.other",
            "80-iabcsbx.test",
            "80-a.b.sbx.test",
        ] {
            assert_eq!(at(host, &[]), Ok(Destination::ControlPlane), "{host}");
            assert_eq!(at(host, &PAIR), sandbox("iother", 9, true), "{host}");
        }
    }

    #[test]
    fn routing_headers() {
        assert_eq!(at("[::1]:8000", &PAIR), sandbox("iother", 9, true));
        assert_eq!(
            at(
                "h",
                &[("E2B-Sandbox-ID", "IABC"), ("e2b-sandbox-port", "8")]
            ),
            sandbox("iabc", 8, true)
        );
        let native = [
            ("x-agentenv-sandbox-id", "inative"),
            ("x-agentenv-target-port", "7"),
        ];
        assert_eq!(
            at("h", &[PAIR, native].concat()),
            sandbox("inative", 7, true),
            "native names win"
        );
        assert_eq!(
            at("h", &[native[0], PAIR[1]]),
            sandbox("inative", 9, true),
            "names may be mixed"
        );
        assert!(at("h", &PAIR[..1]).is_err());
        assert!(at("h", &PAIR[1..]).is_err());
        assert!(
            at("h", &[PAIR[0], PAIR[0], PAIR[1]]).is_err(),
            "duplicates have no meaning"
        );
        for port in ["0", "-1", "+80", "65536", "8o", "", "80, 81", " "] {
            assert!(
                at("h", &[PAIR[0], ("e2b-sandbox-port", port)]).is_err(),
                "{port:?}"
            );
        }
        for id in ["", "../x", "a b", "a-b", "ü", &"i".repeat(65)] {
            assert!(
                at("h", &[("e2b-sandbox-id", id), PAIR[1]]).is_err(),
                "{id:?}"
            );
        }
    }
}
