//! Kernel modules of the initramfs: plain .ko files, loaded in the order of /modules/order.

use std::fs::{self, File};
use std::path::Path;

use rustix::io::Errno;
use rustix::system::finit_module;

use crate::log;

/// Loads what `directory/order` lists, a file name a line. A module that is there already, or that this machine has no use for,
/// is fine; whether what matters is there shows when its device is waited for.
pub fn load_all(directory: &Path) {
    let Ok(order) = fs::read_to_string(directory.join("order")) else {
        return;
    };
    for name in order.lines().map(str::trim).filter(|name| !name.is_empty()) {
        let outcome = File::open(directory.join(name))
            .and_then(|file| finit_module(file, c"", 0).map_err(std::io::Error::from));
        match outcome {
            Err(error) if !harmless(&error) => log::write(format_args!("module {name}: {error}")),
            _ => {}
        }
    }
}

fn harmless(error: &std::io::Error) -> bool {
    let known = [Errno::EXIST, Errno::NODEV, Errno::BUSY];
    known
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}
