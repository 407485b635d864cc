//! The open images. One operation at a time per image, different images in parallel.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};

use crate::error::{Code, Error, Result};
use crate::export::nodes::{Content, Export, Exports, Node};
use crate::export::strand::Strand;
use crate::format::lsmt::{MAX_VIRTUAL_SIZE, SECTOR};
use crate::image::disk::{Disk, Sealed};
use crate::image::frozen::Frozen;
use crate::image::upper::Upper;
use crate::layer::sealed::LayerStore;
use crate::layer::stack::Stack;
use crate::pool::Pool;

const PAGE: u64 = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Disk,
    Memory,
}

/// Body of `PUT /images/{id}`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenRequest {
    kind: Kind,
    #[serde(default)]
    layers: Vec<PathBuf>,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    upper: Option<PathBuf>,
    uid: u32,
    #[serde(default)]
    pending: bool,
}

/// An image as the API shows it.
#[derive(Serialize)]
pub struct Description {
    id: String,
    path: PathBuf,
    size: u64,
    kind: Kind,
    layers: Vec<PathBuf>,
    pending: bool,
    /// Bytes of its upper's data file; 0 without an upper.
    upper_bytes: u64,
    /// Why it answers only errors.
    failed: Option<String>,
}

struct Image {
    id: String,
    request: OpenRequest,
    content: Content,
    /// Shared by memory images of equal layers.
    export: Arc<Export>,
}

#[derive(Default)]
struct Table {
    open: HashMap<String, Arc<Image>>,
    /// Ids that an operation is working on.
    busy: HashSet<String>,
}

pub struct Images {
    store: LayerStore,
    exports: Arc<Exports>,
    pool: Arc<Pool>,
    mount: PathBuf,
    table: Mutex<Table>,
    released: Condvar,
}

/// The exclusive right to work on one id.
struct Claim<'a> {
    images: &'a Images,
    id: &'a str,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.images.table.lock().busy.remove(self.id);
        self.images.released.notify_all();
    }
}

impl Images {
    pub fn new(store: LayerStore, exports: Arc<Exports>, pool: Arc<Pool>, mount: PathBuf) -> Self {
        Self {
            store,
            exports,
            pool,
            mount,
            table: Mutex::default(),
            released: Condvar::new(),
        }
    }

    pub const fn store(&self) -> &LayerStore {
        &self.store
    }

    pub fn count(&self) -> usize {
        self.table.lock().open.len()
    }

    /// In order of their ids.
    pub fn list(&self) -> Vec<Description> {
        let mut images: Vec<Arc<Image>> = self.table.lock().open.values().cloned().collect();
        images.sort_by(|left, right| left.id.cmp(&right.id));
        images.iter().map(|image| self.describe(image)).collect()
    }

    pub fn get(&self, id: &str) -> Result<Description> {
        Ok(self.describe(&*self.find(id)?))
    }

    /// Opens and exports an image, or finds it open after an equal request.
    pub fn open(&self, id: &str, request: OpenRequest) -> Result<Description> {
        let claim = self.claim(id);
        if let Ok(image) = self.find(id) {
            if image.request == request {
                return Ok(self.describe(&image));
            }
            return Err(Error::conflict(format!(
                "image {id} is open with another request"
            )));
        }
        request.check()?;
        let stack = Stack::open(&self.store, &request.layers)?;
        let size = if request.size == 0 {
            stack.virtual_size()
        } else {
            request.size
        };
        let (content, shared) = match (request.kind, &request.upper) {
            (Kind::Disk, Some(upper)) => (
                Content::Disk(
                    Arc::new(Disk::open(&self.store, stack, upper, request.size)?),
                    Strand::new(self.pool.clone()),
                ),
                None,
            ),
            (Kind::Disk, None) => (
                Content::FrozenDisk(Arc::new(Frozen::new(stack, check_size(size, SECTOR)?))),
                None,
            ),
            (Kind::Memory, _) if request.pending => {
                (Content::Memory(Arc::new(Frozen::pending(size))), None)
            }
            (Kind::Memory, _) => {
                let size = check_size(size, PAGE)?;
                match self.find_memory(&stack, size) {
                    Some((content, export)) => (content, Some(export)),
                    None => (Content::Memory(Arc::new(Frozen::new(stack, size))), None),
                }
            }
        };
        let export = shared.unwrap_or_else(|| {
            Arc::new(self.exports.add(Node {
                content: content.clone(),
                uid: request.uid,
            }))
        });
        let image = Arc::new(Image {
            id: id.to_owned(),
            request,
            content,
            export,
        });
        self.table.lock().open.insert(id.to_owned(), image.clone());
        drop(claim);
        log::info!("image {id}: open, {} bytes", self.describe(&image).size);
        Ok(self.describe(&image))
    }

    /// Gives a pending memory image its layers.
    pub fn complete(&self, id: &str, layers: &[PathBuf]) -> Result<Description> {
        let _claim = self.claim(id);
        let image = self.find(id)?;
        let Content::Memory(memory) = &image.content else {
            return Err(Error::conflict(format!("image {id} is a disk")));
        };
        check_paths(layers)?;
        for answer in memory.complete(Stack::open(&self.store, layers)?)? {
            self.pool.submit(answer);
        }
        Ok(self.describe(&image))
    }

    pub fn snapshot(&self, id: &str, layer: &Path) -> Result<Sealed> {
        let _claim = self.claim(id);
        check_paths([layer])?;
        let sealed = self.disk(id)?.seal(&self.store, layer)?;
        log::info!(
            "image {id}: sealed {}, {} bytes",
            layer.display(),
            sealed.size_bytes
        );
        Ok(sealed)
    }

    pub fn flush(&self, id: &str) -> Result<()> {
        let image = self.find(id)?;
        match &image.content {
            Content::Disk(disk, _) => disk.flush(),
            Content::FrozenDisk(frozen) | Content::Memory(frozen) => {
                let layers = frozen.stack().map_or(&[][..], Stack::layers);
                layers
                    .iter()
                    .try_for_each(|layer| layer.sync(&**self.store.files()))
            }
        }
    }

    /// Closes an image; with `discard` its upper's files are removed, else they are flushed first.
    /// It is closed even when that fails.
    pub fn close(&self, id: &str, discard: bool) -> Result<()> {
        let _claim = self.claim(id);
        let image = self.find(id)?;
        let flushed = match &image.content {
            Content::Disk(disk, _) if !discard => disk.flush(),
            _ => Ok(()),
        };
        self.table.lock().open.remove(id);
        match &image.content {
            Content::Disk(disk, _) => disk.close(),
            // The other ids that share it still use it.
            Content::Memory(_) if Arc::strong_count(&image.export) > 1 => {}
            Content::FrozenDisk(frozen) | Content::Memory(frozen) => frozen.close(),
        }
        let removed = match &image.request.upper {
            Some(upper) if discard => Upper::remove(&**self.store.files(), upper),
            _ => Ok(()),
        };
        log::info!("image {id}: closed");
        flushed.and(removed)
    }

    /// Flushes and closes everything; for the end of the process.
    pub fn close_all(&self) {
        for Description { id, .. } in self.list() {
            if let Err(error) = self.close(&id, false) {
                log::error!("image {id}: closing: {error}");
            }
        }
    }

    fn claim<'a>(&'a self, id: &'a str) -> Claim<'a> {
        let mut table = self.table.lock();
        while !table.busy.insert(id.to_owned()) {
            self.released.wait(&mut table);
        }
        Claim { images: self, id }
    }

    fn find(&self, id: &str) -> Result<Arc<Image>> {
        let table = self.table.lock();
        table
            .open
            .get(id)
            .cloned()
            .ok_or_else(|| Error::new(Code::NotFound, format!("no image {id} is open")))
    }

    fn disk(&self, id: &str) -> Result<Arc<Disk>> {
        match &self.find(id)?.content {
            Content::Disk(disk, _) => Ok(disk.clone()),
            _ => Err(Error::conflict(format!("image {id} is not writable"))),
        }
    }

    /// An open memory image that equals `stack`. Two that are opened at the same instant may miss
    /// each other, and then share nothing.
    fn find_memory(&self, stack: &Stack, size: u64) -> Option<(Content, Arc<Export>)> {
        let table = self.table.lock();
        let equal = table.open.values().find(|image| match &image.content {
            Content::Memory(memory) => {
                memory.size == size && memory.stack().is_some_and(|known| known.same_layers(stack))
            }
            _ => false,
        });
        equal.map(|image| (image.content.clone(), image.export.clone()))
    }

    fn describe(&self, image: &Image) -> Description {
        let (size, layers, pending, upper_bytes, failed) = match &image.content {
            Content::Disk(disk, _) => (
                disk.size(),
                disk.layers(),
                false,
                disk.upper_bytes(),
                disk.failed().map(str::to_owned),
            ),
            Content::FrozenDisk(frozen) | Content::Memory(frozen) => {
                let layers = frozen.stack().map(Stack::paths);
                (
                    frozen.size,
                    layers.clone().unwrap_or_default(),
                    layers.is_none(),
                    0,
                    None,
                )
            }
        };
        let path = self.mount.join(&image.export.name);
        Description {
            id: image.id.clone(),
            path,
            size,
            kind: image.request.kind,
            layers,
            pending,
            upper_bytes,
            failed,
        }
    }
}

impl OpenRequest {
    fn check(&self) -> Result<()> {
        check_paths(self.layers.iter().chain(&self.upper))?;
        let unit = if self.kind == Kind::Memory {
            PAGE
        } else {
            SECTOR
        };
        if self.size != 0 {
            check_size(self.size, unit)?;
        }
        match self.kind {
            Kind::Disk if self.pending => Err(Error::invalid("only memory can be pending")),
            Kind::Memory if self.upper.is_some() => {
                Err(Error::invalid("memory is read-only: it takes no upper"))
            }
            Kind::Memory if self.pending && (self.size == 0 || !self.layers.is_empty()) => {
                Err(Error::invalid("a pending image takes a size and no layers"))
            }
            _ => Ok(()),
        }
    }
}

fn check_size(size: u64, unit: u64) -> Result<u64> {
    if size == 0 || !size.is_multiple_of(unit) || size > MAX_VIRTUAL_SIZE {
        return Err(Error::invalid(format!(
            "size {size}: it must be a positive multiple of {unit}"
        )));
    }
    Ok(size)
}

/// Paths must be absolute: the daemon's working directory means nothing to its callers.
pub fn check_paths<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>) -> Result<()> {
    for path in paths {
        let path = path.as_ref();
        if !path.is_absolute() || path.file_name().is_none() {
            return Err(Error::invalid(format!(
                "{}: not an absolute path of a file",
                path.display()
            )));
        }
    }
    Ok(())
}
