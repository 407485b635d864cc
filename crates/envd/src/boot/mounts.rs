//! File systems: the kernel's own, the root disk with what belongs below it, and the move onto it.

use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::{Mode, OFlags, open};
use rustix::mount::{MountFlags, mount, mount_move};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};

use super::Context;
use crate::log;

const PLAIN: MountFlags = MountFlags::NOSUID
    .union(MountFlags::NODEV)
    .union(MountFlags::NOEXEC);
const MEMORY: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);

struct Mount {
    kind: &'static str,
    target: &'static str,
    flags: MountFlags,
    options: &'static CStr,
}

const KERNEL: [Mount; 3] = [
    Mount {
        kind: "proc",
        target: "proc",
        flags: PLAIN,
        options: c"",
    },
    Mount {
        kind: "sysfs",
        target: "sys",
        flags: PLAIN,
        options: c"",
    },
    Mount {
        kind: "devtmpfs",
        target: "dev",
        flags: MountFlags::NOSUID,
        options: c"mode=755",
    },
];
const BELOW_ROOT: [Mount; 4] = [
    Mount {
        kind: "devpts",
        target: "dev/pts",
        flags: MountFlags::NOSUID.union(MountFlags::NOEXEC),
        options: c"gid=5,mode=620,ptmxmode=666",
    },
    Mount {
        kind: "tmpfs",
        target: "dev/shm",
        flags: MEMORY,
        options: c"mode=1777",
    },
    Mount {
        kind: "tmpfs",
        target: "run",
        flags: MEMORY,
        options: c"mode=755",
    },
    Mount {
        kind: "cgroup2",
        target: "sys/fs/cgroup",
        flags: PLAIN,
        options: c"",
    },
];
/// Customary names, which udev would make.
const DEVICE_LINKS: [(&str, &str); 4] = [
    ("/proc/self/fd", "fd"),
    ("/proc/self/fd/0", "stdin"),
    ("/proc/self/fd/1", "stdout"),
    ("/proc/self/fd/2", "stderr"),
];
/// Devices that are safe for everybody, which the kernel gives to root only.
const OPEN_DEVICES: [&str; 2] = ["fuse", "net/tun"];

impl Mount {
    fn at(&self, root: &Path) -> io::Result<()> {
        let target = root.join(self.target);
        make_directory(&target);
        let mounted = mount(self.kind, &target, self.kind, self.flags, self.options);
        // Where the kernel mounted it by itself, that will do.
        match mounted {
            Err(rustix::io::Errno::BUSY) => Ok(()),
            other => other.context(format_args!("mount {} on {}", self.kind, target.display())),
        }
    }
}

/// An image may lack a directory, and may be unable to take it.
fn make_directory(path: &Path) {
    if let Err(error) = fs::create_dir_all(path) {
        log::write(format_args!("mkdir {}: {error}", path.display()));
    }
}

/// /proc, /sys and /dev.
pub fn kernel_file_systems(root: &Path) -> io::Result<()> {
    KERNEL.iter().try_for_each(|mount| mount.at(root))
}

/// Makes the console standard output and error, and nothing standard input. Without a console, standard output is nothing, too: what
/// matters is that no later descriptor gets one of these numbers.
pub fn open_console() {
    let nothing = open("/dev/null", OFlags::RDWR, Mode::empty());
    let console = open(
        "/dev/console",
        OFlags::WRONLY | OFlags::NOCTTY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    if let Ok(nothing) = nothing {
        let _ = dup2_stdin(&nothing);
        let output = console.unwrap_or(nothing);
        let _ = dup2_stdout(&output).and_then(|()| dup2_stderr(&output));
    }
}

/// Mounts the root disk.
pub fn root(device: &Path, target: &Path) -> io::Result<()> {
    fs::create_dir_all(target).context(target.display())?;
    mount(device, target, "ext4", MountFlags::NOATIME, None).context(format_args!(
        "mount {} on {}",
        device.display(),
        target.display()
    ))
}

/// Moves the kernel's file systems below the new root, and adds what a running system has besides. /tmp stays on the disk.
pub fn below_root(root: &Path) -> io::Result<()> {
    for Mount { target, .. } in &KERNEL {
        let (from, to) = (Path::new("/").join(target), root.join(target));
        make_directory(&to);
        mount_move(&from, &to).context(format_args!(
            "move {} to {}",
            from.display(),
            to.display()
        ))?;
    }
    for mount in &BELOW_ROOT {
        // A sandbox without one of these is poorer, but works.
        if let Err(error) = mount.at(root) {
            log::write(format_args!("{error}"));
        }
    }
    let temporary = root.join("tmp");
    if !temporary.exists() {
        make_directory(&temporary);
        let _ = fs::set_permissions(&temporary, fs::Permissions::from_mode(0o1777));
    }
    let devices = root.join("dev");
    for (target, name) in DEVICE_LINKS {
        let _ = symlink(target, devices.join(name));
    }
    for name in OPEN_DEVICES {
        let _ = fs::set_permissions(devices.join(name), fs::Permissions::from_mode(0o666));
    }
    Ok(())
}

/// Frees what the initramfs holds and makes `root` the root of everything.
pub fn switch_root(root: &Path) -> io::Result<()> {
    let initramfs = fs::symlink_metadata("/").context("/")?.dev();
    empty(Path::new("/"), initramfs);
    std::env::set_current_dir(root).context(root.display())?;
    mount_move(".", "/").context("move the new root")?;
    rustix::process::chroot(".").context("chroot")?;
    std::env::set_current_dir("/").context("/")
}

/// Removes all below `directory` that is on the initramfs; it is memory.
fn empty(directory: &Path, initramfs: u64) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        match fs::symlink_metadata(&path) {
            Ok(metadata) if metadata.dev() != initramfs => {}
            Ok(metadata) if metadata.is_dir() => {
                empty(&path, initramfs);
                let _ = fs::remove_dir(&path);
            }
            _ => {
                let _ = fs::remove_file(&path);
            }
        }
    }
}
