//! Files in memory: any changing operation can be made to fail, half done, and the host can lose
//! power.
//!
//! Names are as durable as on a journalling file system that orders them: a rename that happened is
//! not undone.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::Random;
use crate::backend::{Blob, Files, Identity, Lock, Mode};

const SECTOR: usize = 512;

#[derive(Default)]
struct Content {
    bytes: Vec<u8>,
    /// What survives a power loss for certain.
    durable: Vec<u8>,
}

#[derive(Default)]
struct Faults {
    /// Changing operations until one fails; 0: none will.
    countdown: AtomicU64,
    sync_fails: std::sync::atomic::AtomicBool,
}

impl Faults {
    fn strike(&self) -> bool {
        let before = self.countdown.load(Ordering::Relaxed);
        if before > 0 {
            self.countdown.store(before - 1, Ordering::Relaxed);
        }
        before == 1
    }
}

struct MemoryBlob {
    identity: u64,
    content: Mutex<Content>,
    faults: Arc<Faults>,
}

pub struct MemoryFiles {
    names: Mutex<HashMap<PathBuf, Arc<MemoryBlob>>>,
    faults: Arc<Faults>,
    next_identity: AtomicU64,
    boot: AtomicU64,
}

fn failure() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}

impl MemoryFiles {
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            names: Mutex::default(),
            faults: Arc::default(),
            next_identity: AtomicU64::new(1),
            boot: AtomicU64::new(1),
        })
    }

    /// Lets the `count`-th changing operation from now on fail; writes are then half done. 0: none.
    pub fn fail_at(&self, count: u64) {
        self.faults.countdown.store(count, Ordering::Relaxed);
    }

    /// Whether the failure asked for has happened.
    pub fn has_failed(&self) -> bool {
        self.faults.countdown.load(Ordering::Relaxed) == 0
    }

    pub fn fail_syncs(&self) {
        self.faults.sync_fails.store(true, Ordering::Relaxed);
    }

    /// The host loses power and starts again: of what was not synced, each sector survives or not.
    pub fn lose_power(&self, random: &mut Random) {
        for blob in self.names.lock().values() {
            let content = &mut *blob.content.lock();
            let mut after = content.durable.clone();
            if random.below(2) == 0 {
                after.resize(content.bytes.len(), 0);
            }
            let sectors = after.chunks_mut(SECTOR).zip(content.bytes.chunks(SECTOR));
            for (target, written) in
                sectors.filter(|(target, written)| target.len() <= written.len())
            {
                if random.below(2) == 0 {
                    target.copy_from_slice(&written[..target.len()]);
                }
            }
            content.durable.clone_from(&after);
            content.bytes = after;
        }
        self.boot.fetch_add(1, Ordering::Relaxed);
    }

    pub fn put(&self, path: &Path, bytes: Vec<u8>) {
        let blob = self.make();
        blob.content.lock().bytes = bytes;
        self.names.lock().insert(path.to_owned(), blob);
    }

    pub fn bytes(&self, path: &Path) -> Vec<u8> {
        self.names.lock()[path].content.lock().bytes.clone()
    }

    pub fn names(&self) -> Vec<PathBuf> {
        let mut names: Vec<PathBuf> = self.names.lock().keys().cloned().collect();
        names.sort();
        names
    }

    fn make(&self) -> Arc<MemoryBlob> {
        Arc::new(MemoryBlob {
            identity: self.next_identity.fetch_add(1, Ordering::Relaxed),
            content: Mutex::default(),
            faults: self.faults.clone(),
        })
    }
}

impl Files for MemoryFiles {
    fn open(&self, path: &Path, mode: Mode) -> io::Result<Arc<dyn Blob>> {
        let mut names = self.names.lock();
        if mode != Mode::CreateNew {
            let blob = names
                .get(path)
                .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))?;
            return Ok(blob.clone());
        }
        if self.faults.strike() {
            return Err(failure());
        }
        if names.contains_key(path) {
            return Err(io::Error::from_raw_os_error(libc::EEXIST));
        }
        let blob = self.make();
        names.insert(path.to_owned(), blob.clone());
        Ok(blob)
    }

    fn identity(&self, path: &Path) -> io::Result<Identity> {
        let names = self.names.lock();
        let blob = names
            .get(path)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))?;
        Ok((0, blob.identity))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        if self.faults.strike() {
            return Err(failure());
        }
        let mut names = self.names.lock();
        let blob = names
            .remove(from)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))?;
        names.insert(to.to_owned(), blob);
        Ok(())
    }

    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        if self.names.lock().contains_key(to) {
            return Err(io::Error::from_raw_os_error(libc::EEXIST));
        }
        self.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        if self.names.lock().contains_key(path) {
            if self.faults.strike() {
                return Err(failure());
            }
            self.names.lock().remove(path);
        }
        Ok(())
    }

    fn sync_dir(&self, _path: &Path) -> io::Result<()> {
        if self.faults.sync_fails.load(Ordering::Relaxed) {
            Err(failure())
        } else {
            Ok(())
        }
    }

    fn lock_dir(&self, _path: &Path) -> io::Result<Lock> {
        Ok(Box::new(()))
    }

    fn boot_id(&self) -> [u8; 16] {
        u128::from(self.boot.load(Ordering::Relaxed)).to_le_bytes()
    }
}

impl Blob for MemoryBlob {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let content = self.content.lock();
        let end = offset as usize + buffer.len();
        let bytes = content
            .bytes
            .get(offset as usize..end)
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(bytes);
        Ok(())
    }

    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        let struck = self.faults.strike();
        let data = if struck {
            &data[..data.len() / 2]
        } else {
            data
        };
        let bytes = &mut self.content.lock().bytes;
        let end = offset as usize + data.len();
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        bytes[offset as usize..end].copy_from_slice(data);
        if struck { Err(failure()) } else { Ok(()) }
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.content.lock().bytes.len() as u64)
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        if self.faults.strike() {
            return Err(failure());
        }
        self.content.lock().bytes.resize(length as usize, 0);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        if self.faults.sync_fails.load(Ordering::Relaxed) {
            return Err(failure());
        }
        let content = &mut *self.content.lock();
        content.durable.clone_from(&content.bytes);
        Ok(())
    }

    fn write_out(&self, _offset: u64, _length: u64, _wait: bool) -> io::Result<()> {
        Ok(())
    }
}
