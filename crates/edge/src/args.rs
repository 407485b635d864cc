//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::destination::without_port;

pub const USAGE: &str = "usage: edge --listen HOST:PORT --control SOCKET --admin SOCKET
            [--domain D]... [--uid N] [--log PATH] [--max-connections N]

  --listen           the public address; port 0 takes any and says which
  --control          the control plane's unix socket, for everything that is not a sandbox's
  --admin            the unix socket to serve routes, health and metrics on
  --domain           sandboxes are reached as PORT-ID.D
  --uid              the user and group to become once the sockets are open
  --log              where to write failures; standard error if absent
  --max-connections  client connections at once; 0 (default): as many as descriptors allow, at most 16384
";

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Args {
    pub listen: String,
    pub control: PathBuf,
    pub admin: PathBuf,
    pub domains: Vec<String>,
    pub uid: Option<u32>,
    pub log: Option<PathBuf>,
    pub max_connections: usize,
}

impl Args {
    pub fn parse(mut words: impl Iterator<Item = OsString>) -> Result<Self, String> {
        let mut args = Self::default();
        while let Some(name) = words.next() {
            let name = name.to_string_lossy().into_owned();
            let value = words
                .next()
                .ok_or_else(|| format!("{name} needs a value"))?;
            let text = value.to_string_lossy().into_owned();
            let number = || {
                text.parse()
                    .map_err(|_| format!("{name} wants a number, not {text:?}"))
            };
            match name.as_str() {
                "--listen" => args.listen = text,
                "--control" => args.control = value.into(),
                "--admin" => args.admin = value.into(),
                "--domain" => args
                    .domains
                    .push(without_port(text.trim_matches('.')).to_ascii_lowercase()),
                "--uid" => args.uid = Some(number()?),
                "--log" => args.log = Some(value.into()),
                "--max-connections" => args.max_connections = number()? as usize,
                _ => return Err(format!("unknown argument {name:?}")),
            }
        }
        let needed = [
            ("--listen", args.listen.is_empty()),
            ("--control", args.control.as_os_str().is_empty()),
        ];
        for (name, missing) in needed
            .into_iter()
            .chain([("--admin", args.admin.as_os_str().is_empty())])
        {
            if missing {
                return Err(format!("{name} is missing"));
            }
        }
        if args.domains.iter().any(String::is_empty) {
            return Err("--domain is empty".into());
        }
        Ok(args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Args, String> {
        Args::parse(line.split(' ').map(OsString::from))
    }

    #[test]
    fn arguments() {
        let args = parse(
            "--listen [::1]:0 --control /c --admin /a --domain .Sbx.Test:8443 --domain b --uid 7",
        )
        .unwrap();
        assert_eq!(args.domains, ["sbx.test", "b"]);
        assert_eq!((args.uid, args.max_connections), (Some(7), 0));
        for wrong in [
            "--listen x --control /c",
            "--listen",
            "--uid x --listen",
            "--what 1",
            "--listen x --control /c --admin /a --domain .",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
