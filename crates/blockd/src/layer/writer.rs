//! Making a sealed, compacted layer from pieces that several threads deliver in any order.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::backend::{Blob, Files, Mode, with_suffix};
use crate::error::{Context, Error, Result};
use crate::format::lsmt::{
    BLOCK, COMPACT_ENTRIES, ENTRY, Entry, FIRST_DATA_SECTOR, Header, Role, SECTOR, round_up,
};
use crate::layer::index::push_joined;
use crate::uuid::{Uuid, random_name};

/// A layer in the making, under another name until it is whole. Dropping it before [`Self::finish`]
/// leaves nothing behind.
pub struct LayerWriter {
    files: Arc<dyn Files>,
    blob: Arc<dyn Blob>,
    path: PathBuf,
    /// None once the file has its name.
    temporary: Option<PathBuf>,
    uuid: Uuid,
    virtual_size: u64,
    /// First sector not given to a piece yet.
    next: AtomicU64,
    entries: Mutex<Vec<Entry>>,
}

/// A finished layer.
pub struct Written {
    pub path: PathBuf,
    pub size_bytes: u64,
    pub uuid: Uuid,
}

impl LayerWriter {
    pub fn create(files: Arc<dyn Files>, path: &Path, virtual_size: u64) -> Result<Self> {
        let temporary = with_suffix(path, &format!(".{}.partial", random_name()));
        let blob = files
            .open(&temporary, Mode::CreateNew)
            .context(|| format!("make layer {}", path.display()))?;
        let writer = Self {
            files,
            blob,
            path: path.to_owned(),
            temporary: Some(temporary),
            uuid: Uuid::random(),
            virtual_size,
            next: AtomicU64::new(FIRST_DATA_SECTOR),
            entries: Mutex::default(),
        };
        // Now, not after gigabytes of work.
        if writer.files.identity(path).is_ok() {
            return Err(Error::conflict(format!("layer {} exists", path.display())));
        }
        writer.write(&writer.header(Role::SealedHeader, 0, 0), 0)?;
        Ok(writer)
    }

    /// Another uuid than the random one; before anything is appended.
    pub fn set_uuid(&mut self, uuid: Uuid) -> Result<()> {
        self.uuid = uuid;
        self.write(&self.header(Role::SealedHeader, 0, 0), 0)
    }

    /// Waits until the last `length` bytes appended are on their way to the disk. No durability
    /// promise.
    pub fn write_out(&self, length: u64) -> Result<()> {
        let end = self.next.load(Ordering::Relaxed) * SECTOR;
        self.blob
            .write_out(end - length, length, true)
            .context(|| format!("write layer {}", self.path.display()))
    }

    /// Stores `data`, whole sectors. Its `entries` give physical sectors relative to the start of
    /// `data`; ranges of different calls must not overlap.
    pub fn append(&self, data: &[u8], entries: &[Entry]) -> Result<()> {
        let base = self
            .next
            .fetch_add(data.len() as u64 / SECTOR, Ordering::Relaxed);
        self.write(data, base * SECTOR)?;
        let placed = entries.iter().map(|entry| match entry.is_zeroed() {
            true => *entry,
            false => Entry::data(entry.sector(), entry.length(), base + entry.physical()),
        });
        self.entries.lock().extend(placed);
        Ok(())
    }

    /// Writes index and trailer and gives the file its name. Not synced.
    ///
    /// # Errors
    /// `conflict` when the path exists.
    pub fn finish(mut self) -> Result<Written> {
        let index_offset = self.next.load(Ordering::Relaxed) * SECTOR;
        let mut index = compact(std::mem::take(&mut *self.entries.lock()));
        if !index.is_empty() {
            index.resize(
                index.len().next_multiple_of(COMPACT_ENTRIES),
                Entry::PADDING,
            );
        }
        let mut tail: Vec<u8> = index.iter().flat_map(|entry| entry.to_bytes()).collect();
        debug_assert_eq!(tail.len() as u64, index.len() as u64 * ENTRY);
        tail.resize(
            (round_up(index_offset + tail.len() as u64, BLOCK) - index_offset) as usize,
            0,
        );
        tail.extend_from_slice(&self.header(Role::Trailer, index_offset, index.len() as u64));
        self.write(&tail, index_offset)?;
        if let Some(temporary) = &self.temporary {
            let what = || format!("name layer {}", self.path.display());
            self.files.rename_new(temporary, &self.path).context(what)?;
        }
        self.temporary = None;
        let size_bytes = index_offset + tail.len() as u64;
        Ok(Written {
            path: self.path.clone(),
            size_bytes,
            uuid: self.uuid,
        })
    }

    fn header(&self, role: Role, index_offset: u64, index_size: u64) -> [u8; BLOCK as usize] {
        let (virtual_size, uuid) = (self.virtual_size, Some(self.uuid));
        Header {
            role,
            index_offset,
            index_size,
            virtual_size,
            uuid,
            parent: None,
            marked: false,
        }
        .encode()
    }

    fn write(&self, data: &[u8], offset: u64) -> Result<()> {
        self.blob
            .write_at(data, offset)
            .context(|| format!("write layer {}", self.path.display()))
    }
}

impl Drop for LayerWriter {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary
            && let Err(error) = self.files.remove(temporary)
        {
            log::warn!("remove {}: {error}", temporary.display());
        }
    }
}

fn compact(mut entries: Vec<Entry>) -> Vec<Entry> {
    entries.sort_unstable_by_key(|entry| entry.sector());
    let mut joined = Vec::with_capacity(entries.len());
    for entry in entries {
        push_joined(&mut joined, entry);
    }
    joined
}
