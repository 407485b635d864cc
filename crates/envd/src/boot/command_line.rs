//! What the node says on the kernel's command line.

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::path::PathBuf;

use super::Context;

#[derive(Debug, PartialEq, Eq)]
pub struct CommandLine {
    pub address: Ipv4Addr,
    pub prefix: u8,
    pub gateway: Ipv4Addr,
    /// Device of the root file system.
    pub root: PathBuf,
}

impl CommandLine {
    pub fn read() -> io::Result<Self> {
        let text = fs::read_to_string("/proc/cmdline").context("/proc/cmdline")?;
        Self::parse(&text).map_err(|message| io::Error::new(io::ErrorKind::InvalidInput, message))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let value = |name: &str| {
            let given = text.split_ascii_whitespace().rev();
            let mut values = given.filter_map(|word| word.strip_prefix(name)?.strip_prefix('='));
            values
                .next()
                .ok_or_else(|| format!("kernel command line: {name} is missing"))
        };
        let wrong = |name: &str, text: &str| {
            format!("kernel command line: {name}={text}: not what it should be")
        };
        let address = value("aenv.address")?;
        let parts = address
            .split_once('/')
            .and_then(|(ip, prefix)| Some((ip.parse().ok()?, prefix.parse().ok()?)));
        let (ip, prefix) = parts
            .filter(|(_, prefix)| *prefix <= 32)
            .ok_or_else(|| wrong("aenv.address", address))?;
        let gateway = value("aenv.gateway")?;
        let root = PathBuf::from(value("aenv.root")?);
        if !root.is_absolute() {
            return Err(wrong("aenv.root", &root.to_string_lossy()));
        }
        let gateway = gateway
            .parse()
            .map_err(|_| wrong("aenv.gateway", gateway))?;
        Ok(Self {
            address: ip,
            prefix,
            gateway,
            root,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_ours_among_the_kernels() {
        let text = "quiet aenv.root=/dev/vda aenv.address=169.254.0.21/30 console=ttyS0 aenv.gateway=169.254.0.22\n";
        let expected = CommandLine {
            address: Ipv4Addr::new(169, 254, 0, 21),
            prefix: 30,
            gateway: Ipv4Addr::new(169, 254, 0, 22),
            root: "/dev/vda".into(),
        };
        assert_eq!(CommandLine::parse(text), Ok(expected));
    }

    #[test]
    fn names_what_is_wrong() {
        let parse = |text: &str| CommandLine::parse(text).unwrap_err();
        assert_eq!(
            parse("quiet"),
            "kernel command line: aenv.address is missing"
        );
        assert!(parse("aenv.address=1.2.3.4/33").contains("aenv.address=1.2.3.4/33"));
        assert!(parse("aenv.address=1.2.3.4").contains("aenv.address"));
        let rest = "aenv.address=1.2.3.4/8 aenv.root=vda aenv.gateway=1.2.3.5";
        assert!(parse(rest).contains("aenv.root=vda"));
    }
}
