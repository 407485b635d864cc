//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;

/// How the agent was started.
#[derive(Debug, PartialEq, Eq)]
pub enum Invocation {
    Init,
    Program(Arguments),
    Version,
}

/// Options of the ordinary program.
#[derive(Debug, PartialEq, Eq)]
pub struct Arguments {
    pub listen: SocketAddr,
    pub local_control: bool,
    pub machine: bool,
    pub cgroup: Option<PathBuf>,
}

impl Arguments {
    pub const USAGE: &str = "\
usage: envd --listen ADDRESS:PORT [--no-init] [--allow-local-control] [--manage-machine] [--cgroup DIR]
       envd --version
  --no-init              do not act as init, although this is process 1
  --allow-local-control  serve the node's control calls to this machine's own programs, too
  --manage-machine       let control calls set this machine's clock, host name and files in /etc
  --cgroup DIR           a cgroup v2 directory to keep user processes in; without one nothing can be frozen";
}

impl Invocation {
    /// Process 1 is init whatever its arguments are: the kernel passes on what it does not know itself.
    pub fn detect(arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let arguments: Vec<String> = arguments.collect();
        if std::process::id() == 1 && !arguments.iter().any(|argument| argument == "--no-init") {
            return Ok(Self::Init);
        }
        Self::parse(arguments.into_iter())
    }

    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut listen = None;
        let (mut local_control, mut machine, mut cgroup) = (false, false, None);
        while let Some(argument) = arguments.next() {
            let mut value = || {
                arguments
                    .next()
                    .ok_or_else(|| format!("{argument} needs a value"))
            };
            match argument.as_str() {
                "--version" => return Ok(Self::Version),
                "--listen" => {
                    let text = value()?;
                    listen = Some(
                        text.parse()
                            .map_err(|error| format!("--listen {text}: {error}"))?,
                    );
                }
                "--cgroup" => cgroup = Some(PathBuf::from(value()?)),
                "--no-init" => {}
                "--allow-local-control" => local_control = true,
                "--manage-machine" => machine = true,
                _ => return Err(format!("unknown argument {argument}")),
            }
        }
        let listen = listen.ok_or("--listen is required")?;
        Ok(Self::Program(Arguments {
            listen,
            local_control,
            machine,
            cgroup,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Invocation, String> {
        Invocation::parse(line.split_whitespace().map(String::from))
    }

    #[test]
    fn reads_every_option() {
        let expected = Arguments {
            listen: "127.0.0.1:1".parse().unwrap(),
            local_control: true,
            machine: true,
            cgroup: Some("/x".into()),
        };
        let line =
            "--listen 127.0.0.1:1 --no-init --allow-local-control --manage-machine --cgroup /x";
        assert_eq!(parse(line), Ok(Invocation::Program(expected)));
        assert_eq!(parse("--version"), Ok(Invocation::Version));
    }

    #[test]
    fn says_what_is_wrong() {
        assert_eq!(parse("--listen"), Err("--listen needs a value".into()));
        assert_eq!(parse(""), Err("--listen is required".into()));
        assert_eq!(parse("--nope"), Err("unknown argument --nope".into()));
        assert!(parse("--listen nowhere").is_err());
    }
}
