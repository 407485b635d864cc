//! Control groups: the agent in one of its own, everything it starts in another that can be limited and frozen.
//!
//! ```text
//! /sys/fs/cgroup/aenv.agent   the agent: protected memory, most of the CPU when it needs it
//! /sys/fs/cgroup/user         every process of the sandbox: limits, freezer
//! /sys/fs/cgroup/user/N       a process that was started, with its descendants
//! ```
//!
//! A group for each start is what makes a fork bomb bearable: it fills its own share of process numbers and shares the CPU, as
//! one of several equals, with whatever is started to look at it and to end it.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

use crate::log;

/// The sandbox may have this part of the process numbers that the kernel would allow for the memory there is: they would fill an
/// eighth of it with their stacks alone, and each needs about ten times that.
const PIDS_SHARE: u64 = 4;
/// The part of the sandbox's that a single start, with its descendants, must leave to the others.
const PIDS_LEFT: u64 = 8;
/// Memory protected for the agent, which the sandbox may not have.
const MEMORY_AGENT: u64 = 32 << 20;

/// The groups of user processes, or none where the host gave us no control group.
pub struct Cgroups {
    root: Option<PathBuf>,
    /// Limit of each start's own group.
    pids_each: Option<u64>,
    next: AtomicU64,
    /// Groups whose start has ended, but not all of its descendants.
    inhabited: Mutex<Vec<PathBuf>>,
    /// Serialises freezing and thawing.
    turn: tokio::sync::Mutex<()>,
}

/// The group of one start.
pub struct Group {
    path: PathBuf,
    directory: OwnedFd,
}

impl AsFd for Group {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

impl Cgroups {
    pub fn none() -> Self {
        Self::new(None)
    }

    /// Keeps user processes below `root`, a directory of the cgroup2 hierarchy that is ours alone. No limits.
    pub fn at(root: &Path) -> Self {
        Self::new(Some(root.to_owned()))
    }

    /// Makes the groups below `hierarchy`, the machine's cgroup2 mount, moves this process into its own and limits the others.
    pub fn machine(hierarchy: &Path) -> io::Result<Self> {
        let (agent, user) = (hierarchy.join("aenv.agent"), hierarchy.join("user"));
        fs::create_dir_all(&agent)?;
        fs::create_dir_all(&user)?;
        fs::write(agent.join("cgroup.procs"), "0")?;
        enable(hierarchy, &["+cpu", "+memory", "+pids"]);
        enable(&user, &["+cpu", "+pids"]);
        set(&agent, "cpu.weight", 10_000);
        set(&agent, "memory.min", MEMORY_AGENT);
        if let Some(memory) = crate::metrics::memory() {
            set(
                &user,
                "memory.max",
                memory.available.saturating_sub(MEMORY_AGENT),
            );
        }
        let mut groups = Self::at(&user);
        let allowed = ["/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"].map(number);
        if let Some(allowed) = allowed.into_iter().flatten().min() {
            let pids = allowed / PIDS_SHARE;
            set(&user, "pids.max", pids);
            groups.pids_each = Some(pids - pids / PIDS_LEFT);
        }
        Ok(groups)
    }

    fn new(root: Option<PathBuf>) -> Self {
        Self {
            root,
            pids_each: None,
            next: AtomicU64::new(1),
            inhabited: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
        }
    }

    /// Makes the group of one start; nothing where there are no groups. `release` it.
    pub fn group(&self) -> io::Result<Option<Group>> {
        let Some(root) = &self.root else {
            return Ok(None);
        };
        let path = root.join(self.next.fetch_add(1, Ordering::Relaxed).to_string());
        fs::create_dir(&path)?;
        if let Some(pids) = self.pids_each {
            set(&path, "pids.max", pids);
        }
        let directory = File::open(&path)?.into();
        Ok(Some(Group { path, directory }))
    }

    /// Removes a group, or as soon as its last process has ended and another group is released.
    pub fn release(&self, group: Option<Group>) {
        let mut inhabited = self
            .inhabited
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        inhabited.extend(group.map(|group| group.path));
        inhabited.retain(|path| {
            fs::remove_dir(path).is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy)
        });
    }

    /// Stops every user process.
    ///
    /// Errors: why some run on; then all do, as before.
    pub async fn freeze(&self, within: Duration) -> Result<(), String> {
        let _turn = self.turn.lock().await;
        let Some(root) = &self.root else {
            return Err("there is no control group to freeze".into());
        };
        let failure = match timeout(within, freeze_all(root)).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => format!("cannot freeze: {error}"),
            Err(_) => format!(
                "some processes did not stop within {} ms",
                within.as_millis()
            ),
        };
        match request(root, false) {
            Ok(()) => Err(failure),
            Err(error) => Err(format!("{failure}; and cannot thaw: {error}")),
        }
    }

    /// Lets user processes go on. Does nothing when they do.
    pub async fn thaw(&self) -> io::Result<()> {
        let _turn = self.turn.lock().await;
        self.root
            .as_deref()
            .map_or(Ok(()), |root| request(root, false))
    }
}

fn request(root: &Path, frozen: bool) -> io::Result<()> {
    fs::write(root.join("cgroup.freeze"), if frozen { "1" } else { "0" })
}

/// Returns when the kernel says that all are frozen, woken by its notification on cgroup.events.
async fn freeze_all(root: &Path) -> io::Result<()> {
    let file = File::open(root.join("cgroup.events"))?;
    // SAFETY: a File owns its descriptor and keeps it open, and the same, until the AsyncFd that owns it is dropped.
    let events = unsafe { AsyncFd::register_with_interest(file, Interest::PRIORITY) }?;
    request(root, true)?;
    loop {
        // Reading the watched descriptor itself is what arms its next notification.
        let mut content = [0; 256];
        let length = rustix::io::pread(events.get_ref(), &mut content, 0)?;
        if content[..length]
            .split(|&byte| byte == b'\n')
            .any(|line| line == b"frozen 1")
        {
            return Ok(());
        }
        events.ready(Interest::PRIORITY).await?.clear_ready();
    }
}

/// One by one: a kernel without one of the controllers still gives the others.
fn enable(group: &Path, controllers: &[&str]) {
    for controller in controllers {
        let _ = fs::write(group.join("cgroup.subtree_control"), controller);
    }
}

fn set(group: &Path, file: &str, value: u64) {
    if let Err(error) = fs::write(group.join(file), value.to_string()) {
        log::write(format_args!(
            "{}/{file} = {value}: {error}",
            group.display()
        ));
    }
}

fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}
