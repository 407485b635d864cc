//! The machine as a whole, when it is ours: clock, random numbers, names. Each call changes one thing or says why it could not.

use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, Timespec, clock_settime};

use crate::smallfile;

/// A clock closer than this is left alone: stepping it would only disturb those who measure with it.
const CLOCK_TOLERANCE: Duration = Duration::from_millis(20);

// Linux: include/uapi/linux/random.h
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
const ENTROPY_MAX_BYTES: usize = 512;

#[repr(C)]
struct PoolInfo {
    entropy_bits: libc::c_int,
    length_bytes: libc::c_int,
    bytes: [u8; ENTROPY_MAX_BYTES],
}

pub struct Machine;

impl Machine {
    /// Steps the wall clock to `since_epoch` unless it is right to 20 ms.
    pub fn set_clock(&self, since_epoch: Duration) -> io::Result<()> {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        if now.abs_diff(since_epoch) <= CLOCK_TOLERANCE {
            return Ok(());
        }
        let tv_sec = i64::try_from(since_epoch.as_secs()).map_err(io::Error::other)?;
        clock_settime(
            ClockId::Realtime,
            Timespec {
                tv_sec,
                tv_nsec: since_epoch.subsec_nanos().into(),
            },
        )?;
        Ok(())
    }

    /// Credits fresh bytes (at most 512 count) to the kernel's pool and makes its generator take a new seed from it, so that two
    /// machines restored from one state part ways here.
    pub fn add_entropy(&self, bytes: &[u8]) -> io::Result<()> {
        let length = bytes.len().min(ENTROPY_MAX_BYTES);
        let mut info = PoolInfo {
            entropy_bits: (length * 8) as libc::c_int,
            length_bytes: length as libc::c_int,
            bytes: [0; ENTROPY_MAX_BYTES],
        };
        info.bytes[..length].copy_from_slice(&bytes[..length]);
        let device = fs::OpenOptions::new().write(true).open("/dev/random")?;
        // SAFETY: RNDADDENTROPY reads a rand_pool_info, which `info` is laid out as, and `length_bytes` lies within it.
        let added = unsafe { libc::ioctl(device.as_raw_fd(), RNDADDENTROPY as _, &raw const info) };
        // SAFETY: RNDRESEEDCRNG takes no argument.
        if added < 0 || unsafe { libc::ioctl(device.as_raw_fd(), RNDRESEEDCRNG as _) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Sets the kernel's host name, /etc/hostname, and the name's line in /etc/hosts.
    pub fn set_hostname(&self, name: &str) -> io::Result<()> {
        if !is_hostname(name) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not a host name",
            ));
        }
        rustix::system::sethostname(name.as_bytes())?;
        smallfile::replace(Path::new("/etc/hostname"), format!("{name}\n").as_bytes())?;
        let hosts = Path::new("/etc/hosts");
        let old = smallfile::read(hosts).unwrap_or_default();
        smallfile::replace(
            hosts,
            with_own_name(&String::from_utf8_lossy(&old), name).as_bytes(),
        )
    }

    /// Replaces /etc/machine-id where the image has one.
    pub fn set_machine_id(&self, id: &str) -> io::Result<()> {
        if id.len() != 32 || !id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not 32 hex digits",
            ));
        }
        let path = Path::new("/etc/machine-id");
        if path.symlink_metadata().is_err() {
            return Ok(());
        }
        smallfile::replace(path, format!("{}\n", id.to_ascii_lowercase()).as_bytes())
    }

    /// Writes /etc/resolv.conf.
    pub fn set_dns_servers(&self, servers: &[std::net::IpAddr]) -> io::Result<()> {
        let lines: String = servers
            .iter()
            .map(|server| format!("nameserver {server}\n"))
            .collect();
        smallfile::replace(Path::new("/etc/resolv.conf"), lines.as_bytes())
    }

    /// Writes the files by which programs recognise the sandbox, in /run/e2b.
    pub fn set_identity<'a>(
        &self,
        variables: impl IntoIterator<Item = (&'a String, &'a String)>,
    ) -> io::Result<()> {
        for (name, value) in variables {
            smallfile::replace(
                &Path::new("/run/e2b").join(format!(".{name}")),
                value.as_bytes(),
            )?;
        }
        Ok(())
    }
}

fn is_hostname(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
    (1..=64).contains(&name.len()) && name.bytes().all(allowed) && !name.starts_with(['-', '.'])
}

/// The hosts file with its 127.0.1.1 line, the customary place of a machine's own name, replaced.
fn with_own_name(hosts: &str, name: &str) -> String {
    let own = |line: &&str| line.split_whitespace().next() == Some("127.0.1.1");
    let mut lines: Vec<&str> = hosts.lines().filter(|line| !own(line)).collect();
    if !lines
        .iter()
        .any(|line| line.split_whitespace().any(|word| word == "localhost"))
    {
        lines.insert(0, "127.0.0.1 localhost");
    }
    format!("{}\n127.0.1.1 {name}\n", lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_keeps_what_is_not_ours() {
        assert_eq!(
            with_own_name("", "new"),
            "127.0.0.1 localhost\n127.0.1.1 new\n"
        );
        let old = "127.0.0.1 localhost\n127.0.1.1 old\n10.0.0.1 db\n";
        assert_eq!(
            with_own_name(old, "new"),
            "127.0.0.1 localhost\n10.0.0.1 db\n127.0.1.1 new\n"
        );
    }

    #[test]
    fn host_names_are_checked() {
        assert!(is_hostname("i0abc.sandbox-1"));
        for bad in ["", "-a", "a b", "a\nb", &"x".repeat(65)] {
            assert!(!is_hostname(bad), "{bad:?}");
        }
    }
}
