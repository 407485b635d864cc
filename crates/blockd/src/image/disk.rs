//! A writable disk: a log-structured upper over a stack of sealed layers.
//!
//! Locks, in the order they are taken: `gate` (writers share it, a seal has it alone), the upper's
//! own commit lock, `view`. `view` is never held across I/O, so reads wait for nobody: what they
//! found stays readable, because data files only grow and outlive their renaming.

use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock, RwLockReadGuard};

use crate::backend::{Files, Lock};
use crate::error::{Code, Context, Error, Result};
use crate::format::lsmt::SECTOR;
use crate::image::upper::{SealError, Upper};
use crate::layer::index::{ExtentMap, Place, split};
use crate::layer::sealed::{Layer, LayerStore};
use crate::layer::stack::Stack;
use crate::uuid::Uuid;

struct View {
    below: Arc<Stack>,
    upper: Arc<Upper>,
    map: ExtentMap,
}

/// How far the flushed state goes.
#[derive(Default)]
struct Flushed {
    /// The upper whose file names are durable.
    upper: Option<Uuid>,
    /// Its entries that are.
    entries: u64,
}

/// What sealing made.
#[derive(Clone)]
pub struct Sealed {
    pub path: PathBuf,
    pub size_bytes: u64,
    pub live_bytes: u64,
    pub uuid: Uuid,
}

pub struct Disk {
    files: Arc<dyn Files>,
    /// Bytes.
    size: u64,
    gate: RwLock<()>,
    view: RwLock<View>,
    flushed: Mutex<Flushed>,
    /// On the upper's directory; None once closed.
    lock: Mutex<Option<Lock>>,
    /// Why the disk answers nothing but errors.
    failed: OnceLock<String>,
}

impl Disk {
    /// `size` 0 inherits that of the upper, else of the layers.
    pub fn open(store: &LayerStore, below: Stack, upper: &Path, size: u64) -> Result<Self> {
        let files = store.files().clone();
        let lock = files.lock_dir(upper).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => {
                Error::conflict(format!("upper {} is in use", upper.display()))
            }
            _ => Error::io(format!("lock upper {}", upper.display()), &error),
        })?;
        let parent = below.layers().last().and_then(|layer| layer.uuid);
        let (upper, map) = Upper::open(&*files, upper, size, below.virtual_size(), parent)?;
        Ok(Self {
            files,
            size: upper.virtual_size,
            gate: RwLock::new(()),
            view: RwLock::new(View {
                below: Arc::new(below),
                upper: Arc::new(upper),
                map,
            }),
            flushed: Mutex::new(Flushed::default()),
            lock: Mutex::new(Some(lock)),
            failed: OnceLock::new(),
        })
    }

    /// Waits for writes under way; from then on the disk answers only errors, and its upper is free for others.
    pub fn close(&self) {
        let _alone = self.gate.write();
        let _ = self.failed.set("it was closed".into());
        *self.lock.lock() = None;
    }

    pub const fn size(&self) -> u64 {
        self.size
    }

    pub fn failed(&self) -> Option<&str> {
        self.failed.get().map(String::as_str)
    }

    pub fn upper_bytes(&self) -> u64 {
        self.view.read().upper.data_bytes()
    }

    /// Paths of the sealed layers, bottom to top.
    pub fn layers(&self) -> Vec<PathBuf> {
        self.view.read().below.paths()
    }

    /// Fills `buffer` from byte `offset`; both are multiples of the sector and within the size.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let sectors = self.sectors(offset, buffer.len() as u64)?;
        let (pieces, upper, below) = {
            let view = self.view.read();
            (
                view.map.pieces(sectors.clone()),
                view.upper.clone(),
                view.below.clone(),
            )
        };
        for piece in pieces {
            let place = |sector: u64| ((sector - sectors.start) * SECTOR) as usize;
            let target = &mut buffer[place(piece.sectors.start)..place(piece.sectors.end)];
            match piece.place {
                None => below.read(piece.sectors.start * SECTOR, target)?,
                Some(Place::Zeroed) => target.fill(0),
                Some(Place::Data(physical)) => {
                    upper
                        .data
                        .read_at(target, physical * SECTOR)
                        .context(|| "read upper".into())?;
                }
            }
        }
        Ok(())
    }

    /// The right to write; None while a seal runs.
    pub fn try_gate(&self) -> Option<Gate<'_>> {
        self.gate.try_read().map(Gate)
    }

    /// The right to write, waiting for a running seal.
    pub fn gate(&self) -> Gate<'_> {
        Gate(self.gate.read())
    }

    /// Writes whole sectors at byte `offset`. On success data and index entry have been handed to
    /// the kernel; after a failure the range holds what it did. True: [`Self::write_out`] is due
    /// before the write is answered.
    pub fn write(&self, _gate: &Gate<'_>, offset: u64, data: &[u8]) -> Result<bool> {
        let length = data.len() as u64;
        let sectors = self.sectors(offset, length)?;
        if sectors.is_empty() {
            return Ok(false);
        }
        let upper = self.view.read().upper.clone();
        let physical = upper.append(data).context(|| "write upper".into())?;
        self.commit(&upper, sectors, Place::Data(physical))?;
        Ok(Upper::fills_piece(physical, length))
    }

    /// Bounds how much is not on disk, and with it how long a flush takes: may wait for the disk.
    pub fn write_out(&self) -> Result<()> {
        let upper = self.view.read().upper.clone();
        let done = upper.write_out().context(|| "write upper out".into());
        done.inspect_err(|error| self.fail(&error.message))
    }

    /// Makes a range of whole sectors read as zeros.
    pub fn zero(&self, _gate: &Gate<'_>, offset: u64, length: u64) -> Result<()> {
        let sectors = self.sectors(offset, length)?;
        if sectors.is_empty() {
            return Ok(());
        }
        let upper = self.view.read().upper.clone();
        self.commit(&upper, sectors, Place::Zeroed)
    }

    fn commit(&self, upper: &Upper, sectors: Range<u64>, place: Place) -> Result<()> {
        let publish = || self.view.write().map.insert(sectors.clone(), place);
        upper
            .commit(split(sectors.clone(), place), publish)
            .context(|| "write upper's index".into())
    }

    /// Everything acknowledged before the call is on stable storage: upper and all layers below. A
    /// failure is final, since the kernel may have dropped what it could not write.
    pub fn flush(&self) -> Result<()> {
        let mut flushed = self.flushed.lock();
        self.alive()?;
        let (upper, below) = {
            let view = self.view.read();
            (view.upper.clone(), view.below.clone())
        };
        self.flush_to(&mut flushed, &upper, &below)
            .inspect_err(|error| self.fail(&error.message))
    }

    fn flush_to(&self, flushed: &mut Flushed, upper: &Upper, below: &Stack) -> Result<()> {
        for layer in below.layers() {
            layer.sync(&*self.files)?;
        }
        let entries = upper.entries();
        let named = flushed.upper == Some(upper.uuid);
        if named && entries == flushed.entries {
            return Ok(());
        }
        upper
            .sync(&*self.files, entries)
            .context(|| "flush upper".into())?;
        if !named {
            upper
                .sync_names(&*self.files)
                .context(|| "flush upper's directory".into())?;
        }
        *flushed = Flushed {
            upper: Some(upper.uuid),
            entries,
        };
        Ok(())
    }

    /// Seals the upper as `layer` and goes on with an empty one on top of it. Repeating it for the
    /// layer on top answers the same if nothing was written since. Writes wait; reads do not.
    ///
    /// # Errors
    /// `terminal`: the disk has failed and answers only errors. Anything else: it goes on as it
    /// was.
    pub fn seal(&self, store: &LayerStore, layer: &Path) -> Result<Sealed> {
        let _alone = self.gate.write();
        self.alive()?;
        let (upper, below, entries) = {
            let view = self.view.read();
            let top = view
                .below
                .layers()
                .last()
                .filter(|top| top.path == layer && view.map.is_empty());
            if let Some((top, uuid)) = top.and_then(|top| Some((top, top.uuid?))) {
                return Ok(describe(top, uuid));
            }
            (view.upper.clone(), view.below.clone(), view.map.entries())
        };
        if below.is_full() {
            return Err(
                Error::conflict("the stack has as many layers as it can have")
                    .with_hint("compact it first"),
            );
        }
        let next = upper
            .seal(&*self.files, &entries, layer)
            .map_err(|error| match error {
                SealError::Undone(error) => error,
                SealError::Terminal(error) => {
                    self.fail(&error.message);
                    Error {
                        code: Code::Terminal,
                        ..error
                    }
                }
            })?;
        let size_bytes = upper.data.len().unwrap_or_else(|_| upper.data_bytes());
        let top = Arc::new(Layer::sealed(
            layer.to_owned(),
            upper.data.clone(),
            entries,
            upper.virtual_size,
            size_bytes,
            upper.uuid,
        ));
        store.adopt(&top);
        let below = Arc::new(below.with(top.clone()));
        *self.view.write() = View {
            below,
            upper: Arc::new(next),
            map: ExtentMap::default(),
        };
        Ok(describe(&top, upper.uuid))
    }

    /// The sectors of a byte range.
    fn sectors(&self, offset: u64, length: u64) -> Result<Range<u64>> {
        self.alive()?;
        if !offset.is_multiple_of(SECTOR) || !length.is_multiple_of(SECTOR) {
            return Err(Error::invalid(format!(
                "{offset}+{length} is not whole sectors"
            )));
        }
        if offset.checked_add(length).is_none_or(|end| end > self.size) {
            return Err(Error::invalid(format!("{offset}+{length} is past the end")));
        }
        Ok(offset / SECTOR..(offset + length) / SECTOR)
    }

    fn alive(&self) -> Result<()> {
        match self.failed() {
            None => Ok(()),
            Some(why) => Err(Error::new(
                Code::Terminal,
                format!("the image has failed: {why}"),
            )),
        }
    }

    fn fail(&self, why: &str) {
        if self.failed.set(why.to_owned()).is_ok() {
            log::error!("image failed: {why}");
        }
    }
}

fn describe(layer: &Layer, uuid: Uuid) -> Sealed {
    Sealed {
        path: layer.path.clone(),
        size_bytes: layer.size_bytes,
        live_bytes: layer.live_bytes(),
        uuid,
    }
}

/// Held by a write from before it takes space until after it is published.
pub struct Gate<'a>(#[expect(dead_code, reason = "held for its drop")] RwLockReadGuard<'a, ()>);
