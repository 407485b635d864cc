//! Control groups: the agent in one of its own, everything it starts in another that can be limited and frozen.
//!
//! ```text
//! /sys/fs/cgroup/aenv.agent     the agent: protected memory, most of the CPU when it needs it
//! /sys/fs/cgroup/user           every process of the sandbox: process numbers, freezer
//! /sys/fs/cgroup/user/main      where processes start: its own limits of process numbers and memory
//! /sys/fs/cgroup/user/spare     where they start when a fork bomb has filled `main`: to look around, and to end it
//! ```

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

use crate::log;

/// The sandbox's part of the process numbers that the kernel allows for this memory: it would let them fill an eighth of it.
const PIDS_SHARE: u64 = 2;
/// Of those, what a full `main` leaves to `spare`.
const PIDS_SPARE: u64 = 1024;
/// Memory protected for the agent.
const MEMORY_AGENT: u64 = 32 << 20;
/// Memory that a full `main` leaves to `spare`; the part of all memory that it is at most.
const MEMORY_SPARE: u64 = 64 << 20;
const MEMORY_SPARE_SHARE: u64 = 16;

/// The groups of user processes, or none where the host gave us no control group.
pub struct Cgroups {
    user: Option<UserGroups>,
    /// Serialises freezing and thawing.
    turn: tokio::sync::Mutex<()>,
}

struct UserGroups {
    root: PathBuf,
    main: OwnedFd,
    spare: OwnedFd,
}

impl Cgroups {
    pub fn none() -> Self {
        Self {
            user: None,
            turn: tokio::sync::Mutex::default(),
        }
    }

    /// Makes the groups below `hierarchy`, a cgroup2 mount that is ours alone, and moves this process into its own.
    pub fn machine(hierarchy: &Path) -> io::Result<Self> {
        let agent = hierarchy.join("aenv.agent");
        fs::create_dir_all(&agent)?;
        fs::write(agent.join("cgroup.procs"), "0")?;
        enable_controllers(hierarchy);
        set(&agent, "cpu.weight", "10000");
        set(&agent, "memory.min", &MEMORY_AGENT.to_string());
        let groups = Self::at(&hierarchy.join("user"))?;
        groups.limit();
        Ok(groups)
    }

    /// Makes the two groups of user processes in `root`, without limits.
    pub fn at(root: &Path) -> io::Result<Self> {
        let open = |name| {
            let path = root.join(name);
            fs::create_dir_all(&path)?;
            File::open(path).map(OwnedFd::from)
        };
        let (main, spare) = (open("main")?, open("spare")?);
        enable_controllers(root);
        let user = UserGroups {
            root: root.to_owned(),
            main,
            spare,
        };
        Ok(Self {
            user: Some(user),
            turn: tokio::sync::Mutex::default(),
        })
    }

    /// Directories a process may start in, the preferred one first.
    pub fn starting_points(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.user
            .iter()
            .flat_map(|groups| [groups.main.as_fd(), groups.spare.as_fd()])
    }

    fn limit(&self) {
        let Some(UserGroups { root, .. }) = &self.user else {
            return;
        };
        let (main, spare) = (root.join("main"), root.join("spare"));
        let numbers = ["/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"].map(number);
        if let Some(most) = numbers.into_iter().flatten().min() {
            let pids = most / PIDS_SHARE;
            set(root, "pids.max", &pids.to_string());
            set(
                &main,
                "pids.max",
                &(pids - PIDS_SPARE.min(pids / 8)).to_string(),
            );
        }
        if let Some(memory) = crate::metrics::memory() {
            let kept = MEMORY_SPARE.min(memory.total / MEMORY_SPARE_SHARE);
            // Protection passes down only as far as the parent has it.
            set(root, "memory.min", &kept.to_string());
            set(&spare, "memory.min", &kept.to_string());
            set(
                &main,
                "memory.max",
                &memory.total.saturating_sub(MEMORY_AGENT + kept).to_string(),
            );
        }
        set(&spare, "cpu.weight", "1000");
    }

    /// Stops every user process.
    ///
    /// Errors: why some run on; then all do, as before.
    pub async fn freeze(&self, within: Duration) -> Result<(), String> {
        let _turn = self.turn.lock().await;
        let Some(groups) = &self.user else {
            return Err("there is no control group to freeze".into());
        };
        let failure = match timeout(within, groups.set_frozen(true)).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => format!("cannot freeze: {error}"),
            Err(_) => format!(
                "some processes did not stop within {} ms",
                within.as_millis()
            ),
        };
        match groups.request(false) {
            Ok(()) => Err(failure),
            Err(error) => Err(format!("{failure}; and cannot thaw: {error}")),
        }
    }

    /// Lets user processes go on. Does nothing when they do.
    pub async fn thaw(&self) -> io::Result<()> {
        let _turn = self.turn.lock().await;
        match &self.user {
            Some(groups) => groups.request(false),
            None => Ok(()),
        }
    }
}

impl UserGroups {
    fn request(&self, frozen: bool) -> io::Result<()> {
        fs::write(
            self.root.join("cgroup.freeze"),
            if frozen { "1" } else { "0" },
        )
    }

    /// Returns when the kernel says that the state is reached, woken by its notification on cgroup.events.
    async fn set_frozen(&self, frozen: bool) -> io::Result<()> {
        let path = self.root.join("cgroup.events");
        let file = File::open(&path)?;
        // SAFETY: a File owns its descriptor and keeps it open, and the same, until the AsyncFd that owns it is dropped.
        let events = unsafe { AsyncFd::register_with_interest(file, Interest::PRIORITY) }?;
        self.request(frozen)?;
        let wanted = if frozen { "frozen 1" } else { "frozen 0" };
        loop {
            // Reading the watched descriptor itself is what arms its next notification.
            let mut content = [0; 256];
            let length = rustix::io::pread(events.get_ref(), &mut content, 0)?;
            if content[..length]
                .split(|&byte| byte == b'\n')
                .any(|line| line == wanted.as_bytes())
            {
                return Ok(());
            }
            events.ready(Interest::PRIORITY).await?.clear_ready();
        }
    }
}

fn enable_controllers(group: &Path) {
    for controller in ["+cpu", "+memory", "+pids"] {
        // One by one: a kernel without one of them still gives the others.
        let _ = fs::write(group.join("cgroup.subtree_control"), controller);
    }
}

fn set(group: &Path, file: &str, value: &str) {
    if let Err(error) = fs::write(group.join(file), value) {
        log::write(format_args!(
            "{}/{file} = {value}: {error}",
            group.display()
        ));
    }
}

fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}
