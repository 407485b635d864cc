//! Waiting for devices: the kernel says when one appears, so nothing is polled.

use std::fmt::Display;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SocketFlags, SocketType, bind, netlink, recv, socket_with,
};

use super::Context;

/// The group that the kernel itself sends to.
const KERNEL_GROUP: u32 = 1;

pub struct Uevents(OwnedFd);

impl Uevents {
    /// Hears of every device that appears from now on.
    pub fn listen() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(
            AddressFamily::NETLINK,
            SocketType::DGRAM,
            flags,
            Some(netlink::KOBJECT_UEVENT),
        )
        .context("uevent socket")?;
        bind(&socket, &netlink::SocketAddrNetlink::new(0, KERNEL_GROUP))
            .context("uevent socket")?;
        Ok(Self(socket))
    }

    /// Returns once `present` holds, looking again at every event.
    ///
    /// Errors: `TimedOut`, naming `what`.
    pub fn wait_for(
        &self,
        what: &dyn Display,
        within: Duration,
        present: impl Fn() -> bool,
    ) -> io::Result<()> {
        let deadline = Instant::now() + within;
        while !present() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let message = format!("{what} did not appear within {} s", within.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, message));
            }
            let timeout = Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            };
            poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&timeout))
                .context("uevent socket")?;
            // What it says does not matter; and a full queue, which is an error here, is news as well.
            let mut message = [0; 8192];
            while recv(&self.0, &mut message[..], RecvFlags::empty()).is_ok() {}
        }
        Ok(())
    }
}
