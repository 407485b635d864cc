//! From the first instruction of PID 1 to the point where the agent can serve; and the little that an ordinary program needs.
//!
//! ```text
//! initramfs: /proc /sys /dev → modules → root disk on /sysroot → its mounts → initramfs emptied → /sysroot is /
//!            → control groups → listening sockets → network
//! ```
//!
//! A step that the sandbox cannot live without ends the boot with an error, which the kernel turns into a panic on the console.

mod command_line;
mod modules;
mod mounts;
mod network;
mod uevents;

use std::fs;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, setrlimit};

use crate::arguments::Arguments;
use crate::cgroup::Cgroups;
use crate::control::Control;
use crate::machine::Machine;
use crate::{PORT, log};
use command_line::CommandLine;
use uevents::Uevents;

const SYSROOT: &str = "/sysroot";
const MODULES: &str = "/modules";
const INTERFACE: &str = "eth0";
const CGROUPS: &str = "/sys/fs/cgroup";
/// How long devices may take to appear.
const DEVICES_WITHIN: Duration = Duration::from_secs(30);
/// Descriptors of the agent, and of every process it starts.
const OPEN_FILES: Rlimit = Rlimit {
    current: Some(65_536),
    maximum: Some(1 << 20),
};

/// All that serving needs.
pub struct Started {
    /// Where to listen, and whom the node's control calls are served to there.
    pub listeners: Vec<(TcpListener, Control)>,
    pub cgroups: Cgroups,
    pub machine: Option<Machine>,
}

/// Boots the machine as PID 1.
pub fn run() -> io::Result<Started> {
    let since = Instant::now();
    mounts::kernel_file_systems(Path::new("/"))?;
    mounts::open_console();
    let options = CommandLine::read()?;
    let uevents = Uevents::listen()?;
    modules::load_all(Path::new(MODULES));
    let loaded = since.elapsed();

    let root = options.root.as_path();
    uevents.wait_for(&options.root.display(), DEVICES_WITHIN, || root.exists())?;
    mounts::root(root, Path::new(SYSROOT))?;
    mounts::below_root(Path::new(SYSROOT))?;
    let mounted = since.elapsed();

    mounts::switch_root(Path::new(SYSROOT))?;

    // Kernels without these protections still run a sandbox.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    let _ = setrlimit(Resource::Nofile, OPEN_FILES);
    let cgroups = Cgroups::machine(Path::new(CGROUPS)).unwrap_or_else(|error| {
        log::write(format_args!(
            "no control groups, so nothing can be frozen: {error}"
        ));
        Cgroups::none()
    });
    uevents.wait_for(&INTERFACE, DEVICES_WITHIN, || {
        Path::new("/sys/class/net").join(INTERFACE).exists()
    })?;
    // Two devices, two listeners: containers behind a bridge of the sandbox's own reach neither. Its processes reach the one on
    // the network card by that card's address, so there the caller's address decides.
    // Listening comes before the network works: who waits to connect is accepted by the first packet that gets through.
    let anywhere = (Ipv4Addr::UNSPECIFIED, PORT).into();
    let card = network::listen(anywhere, Some(INTERFACE))?;
    let inside = network::listen(anywhere, Some("lo"))?;
    network::up("lo")?;
    network::configure(INTERFACE, options.address, options.prefix, options.gateway)?;
    log::write(format_args!(
        "booted in {} ms (modules after {}, root after {})",
        since.elapsed().as_millis(),
        loaded.as_millis(),
        mounted.as_millis()
    ));
    Ok(Started {
        listeners: vec![(card, Control::Outsiders), (inside, Control::Nobody)],
        cgroups,
        machine: Some(Machine),
    })
}

/// Prepares to serve as an ordinary program; nothing of the machine is changed.
pub fn as_program(arguments: &Arguments) -> io::Result<Started> {
    let control = if arguments.local_control {
        Control::Everybody
    } else {
        Control::Outsiders
    };
    Ok(Started {
        listeners: vec![(network::listen(arguments.listen, None)?, control)],
        cgroups: arguments
            .cgroup
            .as_deref()
            .map_or_else(Cgroups::none, Cgroups::at),
        machine: arguments.machine.then_some(Machine),
    })
}

/// Says what failed before why.
trait Context<T> {
    fn context(self, what: impl std::fmt::Display) -> io::Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for Result<T, E> {
    fn context(self, what: impl std::fmt::Display) -> io::Result<T> {
        self.map_err(|error| {
            let error = error.into();
            io::Error::new(error.kind(), format!("{what}: {error}"))
        })
    }
}
