//! Sealed layers: opening them (their bytes are hostile input), sharing them between stacks, and
//! making them durable.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::backend::{Blob, Files, Identity, Mode};
use crate::content;
use crate::error::{Context, Error, Result};
use crate::format::lsmt::{
    BLOCK, ENTRY, Entry, FIRST_DATA_SECTOR, Header, MAX_SECTOR, MAX_VIRTUAL_SIZE, Role, SECTOR,
};
use crate::uuid::Uuid;

/// Entries of one index: half a GiB of memory, far above what real layers have.
const MAX_ENTRIES: usize = 1 << 25;
const INDEX_CHUNK: u64 = 1 << 20;

/// A sealed layer, open. Immutable.
pub struct Layer {
    pub path: PathBuf,
    /// The content of the file, out of its wrappings.
    pub blob: Arc<dyn Blob>,
    /// Sorted and disjoint, tags zero; data within the file.
    pub index: Vec<Entry>,
    /// Bytes.
    pub virtual_size: u64,
    /// Of the file, wrappings included.
    pub size_bytes: u64,
    pub uuid: Option<Uuid>,
    /// Set once the file and its name are known to be on stable storage.
    synced: AtomicBool,
}

impl Layer {
    /// A layer just sealed by this process: everything about it is known, nothing of it is durable
    /// yet.
    pub fn sealed(
        path: PathBuf,
        blob: Arc<dyn Blob>,
        index: Vec<Entry>,
        virtual_size: u64,
        size_bytes: u64,
        uuid: Uuid,
    ) -> Self {
        Self {
            path,
            blob,
            index,
            virtual_size,
            size_bytes,
            uuid: Some(uuid),
            synced: AtomicBool::new(false),
        }
    }

    fn open(files: &dyn Files, path: &Path) -> Result<Self> {
        let blob = files
            .open(path, Mode::Read)
            .context(|| format!("open layer {}", path.display()))?;
        let what = || format!("layer {}", path.display());
        let size_bytes = blob.len().context(what)?;
        let blob = content::unwrap(blob).context(what)?;
        let (trailer, length) = read_trailer(&*blob, path)?;
        let index = read_index(&*blob, &trailer, length, path)?;
        Ok(Self {
            path: path.to_owned(),
            blob,
            index,
            virtual_size: trailer.virtual_size,
            size_bytes,
            uuid: trailer.uuid,
            synced: AtomicBool::new(false),
        })
    }

    /// Bytes of data that the layer's entries refer to.
    pub fn live_bytes(&self) -> u64 {
        self.index
            .iter()
            .filter(|entry| !entry.is_zeroed())
            .map(|entry| entry.length() * SECTOR)
            .sum()
    }

    /// The file and its name are on stable storage. Free when that is known already.
    pub fn sync(&self, files: &dyn Files) -> Result<()> {
        if self.synced.load(Ordering::Acquire) {
            return Ok(());
        }
        self.blob
            .sync()
            .context(|| format!("sync layer {}", self.path.display()))?;
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        files
            .sync_dir(directory)
            .context(|| format!("sync directory {}", directory.display()))?;
        self.synced.store(true, Ordering::Release);
        Ok(())
    }
}

fn read_block(blob: &dyn Blob, offset: u64, path: &Path) -> Result<[u8; BLOCK as usize]> {
    let mut block = [0; BLOCK as usize];
    blob.read_at(&mut block, offset)
        .context(|| format!("read layer {}", path.display()))?;
    Ok(block)
}

fn read_trailer(blob: &dyn Blob, path: &Path) -> Result<(Header, u64)> {
    let corrupt = |why: &str| Error::corrupt(format!("layer {}: {why}", path.display()));
    let size = blob
        .len()
        .context(|| format!("stat layer {}", path.display()))?;
    if size < 2 * BLOCK {
        return Err(corrupt("shorter than a header and a trailer"));
    }
    let header = Header::decode(&read_block(blob, 0, path)?)
        .filter(|header| matches!(header.role, Role::DataHeader | Role::SealedHeader))
        .ok_or_else(|| corrupt("no LSMT header"))?;
    let trailer = Header::decode(&read_block(blob, size - BLOCK, path)?)
        .filter(|trailer| trailer.role == Role::Trailer)
        .ok_or_else(|| corrupt("no LSMT trailer; it is cut off or was never sealed"))?;
    if header.uuid != trailer.uuid {
        return Err(corrupt("header and trailer have different uuids"));
    }
    if trailer.virtual_size % SECTOR != 0 || trailer.virtual_size > MAX_VIRTUAL_SIZE {
        return Err(corrupt("impossible virtual size"));
    }
    let index_end = trailer
        .index_size
        .checked_mul(ENTRY)
        .and_then(|bytes| bytes.checked_add(trailer.index_offset));
    if trailer.index_offset < BLOCK || index_end.is_none_or(|end| end > size - BLOCK) {
        return Err(corrupt("its index lies outside the file"));
    }
    Ok((trailer, size))
}

fn read_index(blob: &dyn Blob, trailer: &Header, size: u64, path: &Path) -> Result<Vec<Entry>> {
    let corrupt = |why: &str, entry: Entry| {
        Error::corrupt(format!("layer {}: entry {entry:?}: {why}", path.display()))
    };
    let data_end = trailer.index_offset / SECTOR;
    let index_bytes = trailer.index_size * ENTRY;
    debug_assert!(trailer.index_offset + index_bytes <= size - BLOCK);
    // Grows with the entries that are real, not with the number the trailer claims.
    let mut index: Vec<Entry> = Vec::new();
    let mut buffer = vec![0; index_bytes.min(INDEX_CHUNK) as usize];
    let mut at = 0;
    while at < index_bytes {
        let chunk = &mut buffer[..(index_bytes - at).min(INDEX_CHUNK) as usize];
        blob.read_at(chunk, trailer.index_offset + at)
            .context(|| format!("read index of {}", path.display()))?;
        at += chunk.len() as u64;
        let (entries, _) = chunk.as_chunks::<{ ENTRY as usize }>();
        for entry in entries
            .iter()
            .map(|bytes| Entry::from_bytes(bytes).with_tag(0))
        {
            if entry.length() == 0 {
                continue;
            }
            if entry.end() > MAX_SECTOR {
                return Err(corrupt("past the last sector there can be", entry));
            }
            if index.last().is_some_and(|last| last.end() > entry.sector()) {
                return Err(corrupt("unsorted, or overlaps the one before", entry));
            }
            let physical_end = entry.physical() + entry.length();
            if !entry.is_zeroed()
                && (entry.physical() < FIRST_DATA_SECTOR || physical_end > data_end)
            {
                return Err(corrupt("its data lies outside the file", entry));
            }
            if index.len() == MAX_ENTRIES {
                return Err(corrupt("more entries than a layer can have", entry));
            }
            index.push(entry);
        }
    }
    index.shrink_to_fit();
    Ok(index)
}

/// All layers open now; each file is open once, whoever uses it.
pub struct LayerStore {
    files: Arc<dyn Files>,
    open: Mutex<HashMap<PathBuf, (Identity, Weak<Layer>)>>,
}

impl LayerStore {
    pub fn new(files: Arc<dyn Files>) -> Self {
        Self {
            files,
            open: Mutex::new(HashMap::new()),
        }
    }

    pub fn files(&self) -> &Arc<dyn Files> {
        &self.files
    }

    /// The layer at `path`, opened and checked if it is not open yet.
    pub fn open(&self, path: &Path) -> Result<Arc<Layer>> {
        let identity = self
            .files
            .identity(path)
            .context(|| format!("open layer {}", path.display()))?;
        if let Some(layer) = self.known(path, identity) {
            return Ok(layer);
        }
        // Not under the lock: a large index takes time. Of two that race here the second opens a
        // copy that is equal.
        let layer = Arc::new(Layer::open(&*self.files, path)?);
        self.remember(identity, &layer);
        Ok(layer)
    }

    /// Shares a layer that this process sealed.
    pub fn adopt(&self, layer: &Arc<Layer>) {
        if let Ok(identity) = self.files.identity(&layer.path) {
            self.remember(identity, layer);
        }
    }

    fn known(&self, path: &Path, identity: Identity) -> Option<Arc<Layer>> {
        let open = self.open.lock();
        open.get(path)
            .filter(|(known, _)| *known == identity)
            .and_then(|(_, layer)| layer.upgrade())
    }

    fn remember(&self, identity: Identity, layer: &Arc<Layer>) {
        let mut open = self.open.lock();
        open.retain(|_, (_, layer)| layer.strong_count() > 0);
        open.insert(layer.path.clone(), (identity, Arc::downgrade(layer)));
    }
}
