//! The files of a log-structured upper: making, recovering, appending, marking, sealing. Knows
//! nothing of reads or of what lies below.
//!
//! Both files only grow. Source: docs/formats/lsmt.md, "Upper". Making, recovering and sealing stay in
//! one module, a little long: they keep the same invariants over the same two files.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::backend::{Blob, Files, Mode, with_suffix};
use crate::error::{Context, Error, Result};
use crate::format::lsmt::{
    BLOCK, ENTRY, Entry, FIRST_DATA_SECTOR, Header, MAX_VIRTUAL_SIZE, Role, SECTOR, Watermark,
    round_up,
};
use crate::layer::index::{ExtentMap, Place};
use crate::uuid::Uuid;

/// Data is written out in pieces of this many bytes …
const WRITE_OUT: u64 = 8 << 20;
/// … and this many pieces may be on their way before writers wait for the oldest: what bounds the
/// time of a flush.
const IN_FLIGHT: u64 = 4;
const INDEX_CHUNK: u64 = 1 << 20;

pub struct Upper {
    directory: PathBuf,
    pub uuid: Uuid,
    parent: Option<Uuid>,
    pub virtual_size: u64,
    pub data: Arc<dyn Blob>,
    index: Arc<dyn Blob>,
    /// First physical sector not given to a write yet.
    next: AtomicU64,
    /// Entries in the index file.
    entries: Mutex<u64>,
    /// Pieces of [`WRITE_OUT`] bytes that are being written out, or are.
    written_out: Mutex<u64>,
}

fn data_path(directory: &Path) -> PathBuf {
    directory.join("upper.data")
}

fn index_path(directory: &Path) -> PathBuf {
    directory.join("upper.index")
}

fn next_of(path: &Path) -> PathBuf {
    with_suffix(path, ".next")
}

impl Upper {
    /// Opens the upper in `directory`, finishing a seal that was cut short, or makes a new one of
    /// `size` bytes when there is none or it was never flushed before the host went down. `size` 0
    /// is that of the upper, for a new one `inherited`; a larger one grows it, for good. `parent` is the
    /// uuid of the layer right below.
    ///
    /// # Errors
    /// `conflict` when it belongs on another layer or is larger; `corrupt`.
    pub fn open(
        files: &dyn Files,
        directory: &Path,
        size: u64,
        inherited: u64,
        parent: Option<Uuid>,
    ) -> Result<(Self, ExtentMap)> {
        finish_seal(files, directory)?;
        match Self::recover(files, directory)? {
            Some((upper, _)) if upper.parent.is_some() && upper.parent != parent => {
                Err(Error::conflict(format!(
                    "upper {}: it continues layer {}, which is not the top of the stack",
                    directory.display(),
                    upper
                        .parent
                        .map_or_else(String::new, |uuid| uuid.to_string()),
                ))
                .with_hint("it was sealed meanwhile: open it with the sealed layer on top"))
            }
            Some((upper, _)) if size != 0 && size < upper.virtual_size => {
                Err(Error::conflict(format!(
                    "upper {}: its size is {} bytes, and it cannot shrink to {size}",
                    directory.display(),
                    upper.virtual_size
                )))
            }
            Some((mut upper, map)) if size > upper.virtual_size => {
                upper
                    .grow(size)
                    .context(|| format!("grow upper {}", directory.display()))?;
                Ok((upper, map))
            }
            Some(recovered) => Ok(recovered),
            None if size == 0 && inherited == 0 => {
                Err(Error::invalid("a new upper without layers needs a size"))
            }
            None => {
                let size = if size == 0 { inherited } else { size };
                Self::remove(files, directory)?;
                let [data, index] = [data_path(directory), index_path(directory)];
                Ok((
                    Self::create(files, directory, &data, &index, size, parent)?,
                    ExtentMap::default(),
                ))
            }
        }
    }

    /// Removes the files of an upper that is not open.
    pub fn remove(files: &dyn Files, directory: &Path) -> Result<()> {
        for path in [index_path(directory), data_path(directory)] {
            files
                .remove(&path)
                .context(|| format!("remove {}", path.display()))?;
        }
        Ok(())
    }

    fn create(
        files: &dyn Files,
        directory: &Path,
        data_path: &Path,
        index_path: &Path,
        virtual_size: u64,
        parent: Option<Uuid>,
    ) -> Result<Self> {
        let uuid = Uuid::random();
        let make = |path: &Path, role| {
            let marked = role == Role::IndexHeader;
            let index_offset = if marked { BLOCK } else { 0 };
            let header = Header {
                role,
                index_offset,
                index_size: 0,
                virtual_size,
                uuid: Some(uuid),
                parent,
                marked,
            };
            let mut block = header.encode();
            if marked {
                let mark = Watermark {
                    entries: 0,
                    boot_id: files.boot_id(),
                };
                block[Watermark::OFFSET as usize..][..SECTOR as usize]
                    .copy_from_slice(&mark.encode());
            }
            let blob = files.open(path, Mode::CreateNew)?;
            blob.write_at(&block, 0)?;
            Ok(blob)
        };
        let data = make(data_path, Role::DataHeader)
            .context(|| format!("make {}", data_path.display()))?;
        let index = make(index_path, Role::IndexHeader)
            .context(|| format!("make {}", index_path.display()))?;
        Ok(Self {
            directory: directory.to_owned(),
            uuid,
            parent,
            virtual_size,
            data,
            index,
            next: AtomicU64::new(FIRST_DATA_SECTOR),
            entries: Mutex::new(0),
            written_out: Mutex::new(0),
        })
    }

    /// Gives the image a larger size. It is the data file's header that counts, one sector of it; a
    /// failure leaves the old size or the new one, and what was written is not touched.
    fn grow(&mut self, size: u64) -> std::io::Result<()> {
        for blob in [&self.data, &self.index] {
            blob.write_at(&size.to_le_bytes(), Header::VIRTUAL_SIZE_OFFSET)?;
            blob.sync()?;
        }
        self.virtual_size = size;
        Ok(())
    }

    /// None: there is no upper, or none that ever held anything that counts.
    fn recover(files: &dyn Files, directory: &Path) -> Result<Option<(Self, ExtentMap)>> {
        let corrupt = |why: &str| Error::corrupt(format!("upper {}: {why}", directory.display()));
        let what = || format!("read upper {}", directory.display());
        let data_file = open_existing(files, &data_path(directory)).context(what)?;
        let index_file = open_existing(files, &index_path(directory)).context(what)?;
        let Some(index) = index_file else {
            return Ok(None);
        };
        let Some(block) = first_block(&*index).context(what)? else {
            return Ok(None);
        };
        let header = Header::decode(&block)
            .filter(|header| header.role == Role::IndexHeader)
            .ok_or_else(|| corrupt("upper.index has no header of an index file"))?;
        let whole = index.len().context(what)?.saturating_sub(BLOCK) / ENTRY;
        let mark = Watermark::decode(&block);
        let same_boot = mark.is_some_and(|mark| mark.boot_id == files.boot_id());
        let foreign = mark.is_none() && !header.marked;
        let entries = if same_boot || foreign {
            whole
        } else {
            // Without its mark, no flush was ever completed.
            mark.map_or(0, |mark| mark.entries.min(whole))
        };
        let data_block = data_file
            .as_deref()
            .map(first_block)
            .transpose()
            .context(what)?
            .flatten();
        let (Some(data), Some(data_block)) = (data_file, data_block) else {
            // A flush would have made the data file durable first.
            return if entries == 0 {
                Ok(None)
            } else {
                Err(corrupt("upper.data is gone"))
            };
        };
        let data_header = Header::decode(&data_block)
            .filter(|header| header.role == Role::DataHeader)
            .ok_or_else(|| corrupt("upper.data has no header of an upper"))?;
        let Some(uuid) = header.uuid.filter(|_| header.uuid == data_header.uuid) else {
            return Err(corrupt("upper.data and upper.index have different uuids"));
        };
        let virtual_size = data_header.virtual_size;
        if virtual_size == 0 || virtual_size % SECTOR != 0 || virtual_size > MAX_VIRTUAL_SIZE {
            return Err(corrupt("impossible virtual size"));
        }

        let data_end = data.len().context(what)? / SECTOR;
        let (map, next) = replay(&*index, entries, virtual_size / SECTOR, data_end)
            .context(what)?
            .ok_or_else(|| corrupt("an index entry lies outside the image or the data file"))?;
        // What was cut off must never come back, nor the next entry land on half of an old one.
        index.set_len(BLOCK + entries * ENTRY).context(what)?;
        let upper = Self {
            directory: directory.to_owned(),
            uuid,
            parent: data_header.parent,
            virtual_size,
            data,
            index,
            next: AtomicU64::new(next),
            entries: Mutex::new(entries),
            written_out: Mutex::new(next * SECTOR / WRITE_OUT),
        };
        if foreign {
            upper.sync(files, entries).context(what)?;
        } else if !same_boot {
            upper.mark(files, entries).context(what)?;
        }
        Ok(Some((upper, map)))
    }

    /// Size of the data file, bytes.
    pub fn data_bytes(&self) -> u64 {
        self.next.load(Ordering::Relaxed) * SECTOR
    }

    /// Entries that have been handed to the kernel, their data before them.
    pub fn entries(&self) -> u64 {
        *self.entries.lock()
    }

    /// Appends whole sectors and returns the physical sector they are at. Calls may run in
    /// parallel. After a failure the space is lost, nothing else.
    pub fn append(&self, data: &[u8]) -> std::io::Result<u64> {
        let length = data.len() as u64;
        let sector = self.next.fetch_add(length / SECTOR, Ordering::Relaxed);
        self.data.write_at(data, sector * SECTOR)?;
        Ok(sector)
    }

    /// Whether an append of `length` bytes at `sector` has filled a piece, so that [`Self::write_out`]
    /// is due before the write is answered.
    pub fn fills_piece(sector: u64, length: u64) -> bool {
        (sector * SECTOR + length) / WRITE_OUT > sector * SECTOR / WRITE_OUT
    }

    /// Keeps what is not on disk yet bounded: starts to write out all full pieces, and waits for
    /// those that should be done. After a failure the kernel may have dropped data.
    pub fn write_out(&self) -> std::io::Result<()> {
        let mut piece = self.written_out.lock();
        while (*piece + 1) * WRITE_OUT <= self.data_bytes() {
            self.data.write_out(*piece * WRITE_OUT, WRITE_OUT, false)?;
            if let Some(oldest) = piece.checked_sub(IN_FLIGHT) {
                self.data.write_out(oldest * WRITE_OUT, WRITE_OUT, true)?;
            }
            *piece += 1;
        }
        Ok(())
    }

    /// Hands `entries` to the kernel, then calls `publish`, both before any other commit: the order
    /// of the index file is that of publishing. After a failure nothing is committed.
    pub fn commit(
        &self,
        entries: impl Iterator<Item = Entry>,
        publish: impl FnOnce(),
    ) -> std::io::Result<()> {
        let mut count = self.entries.lock();
        let mut bytes = Vec::with_capacity(ENTRY as usize);
        let mut written = *count;
        let mut write = |bytes: &mut Vec<u8>| {
            self.index.write_at(bytes, BLOCK + written * ENTRY)?;
            written += bytes.len() as u64 / ENTRY;
            bytes.clear();
            Ok::<(), std::io::Error>(())
        };
        for entry in entries {
            bytes.extend_from_slice(&entry.to_bytes());
            if bytes.len() as u64 >= INDEX_CHUNK {
                write(&mut bytes)?;
            }
        }
        write(&mut bytes)?;
        *count = written;
        publish();
        Ok(())
    }

    /// The first `entries` entries and their data are on stable storage, and known to be.
    pub fn sync(&self, files: &dyn Files, entries: u64) -> std::io::Result<()> {
        self.data.sync()?;
        self.mark(files, entries)?;
        self.index.sync()
    }

    /// The names of the files are on stable storage.
    pub fn sync_names(&self, files: &dyn Files) -> std::io::Result<()> {
        files.sync_dir(&self.directory)
    }

    fn mark(&self, files: &dyn Files, entries: u64) -> std::io::Result<()> {
        let mark = Watermark {
            entries,
            boot_id: files.boot_id(),
        };
        self.index.write_at(&mark.encode(), Watermark::OFFSET)
    }

    /// Seals the data file in place with `index`, renames it to `layer` and makes an empty upper in
    /// its stead. No write may run meanwhile.
    ///
    /// # Errors
    /// [`SealError::Undone`]: nothing has changed. [`SealError::Terminal`]: the file is at `layer`,
    /// but the new upper is not in place.
    pub fn seal(
        &self,
        files: &dyn Files,
        index: &[Entry],
        layer: &Path,
    ) -> std::result::Result<Self, SealError> {
        let [data, index_file] = [data_path(&self.directory), index_path(&self.directory)];
        let (next_data, next_index) = (next_of(&data), next_of(&index_file));
        let end = self.data_bytes();
        let prepared = self
            .append_trailer(index, end)
            .context(|| format!("seal upper {}", self.directory.display()))
            .and_then(|()| {
                // Leftovers of a seal that failed before; in this order, see `finish_seal`.
                for path in [&next_index, &next_data] {
                    files
                        .remove(path)
                        .context(|| format!("remove {}", path.display()))?;
                }
                Self::create(
                    files,
                    &self.directory,
                    &next_data,
                    &next_index,
                    self.virtual_size,
                    Some(self.uuid),
                )
            })
            .and_then(|next| {
                files
                    .rename_new(&data, layer)
                    .context(|| format!("rename sealed upper to {}", layer.display()))?;
                Ok(next)
            });
        let next = prepared.map_err(|error| {
            // Nothing refers to what these leave behind, so failing to tidy up is harmless.
            let _ = files.remove(&next_index);
            let _ = files.remove(&next_data);
            let _ = self.data.set_len(end);
            SealError::Undone(error)
        })?;
        let in_place = files
            .rename(&next_data, &data)
            .and_then(|()| files.rename(&next_index, &index_file));
        match in_place
            .context(|| format!("put the new upper of {} in place", self.directory.display()))
        {
            Ok(()) => Ok(next),
            Err(error) => Err(SealError::Terminal(error)),
        }
    }

    fn append_trailer(&self, index: &[Entry], end: u64) -> std::io::Result<()> {
        let mut tail: Vec<u8> = index.iter().flat_map(|entry| entry.to_bytes()).collect();
        tail.resize(round_up(tail.len() as u64, SECTOR) as usize, 0xff);
        let trailer_offset = round_up(end + tail.len() as u64, BLOCK);
        tail.resize((trailer_offset - end) as usize, 0);
        let trailer = Header {
            role: Role::Trailer,
            index_offset: end,
            index_size: index.len() as u64,
            virtual_size: self.virtual_size,
            uuid: Some(self.uuid),
            parent: self.parent,
            marked: false,
        };
        tail.extend_from_slice(&trailer.encode());
        self.data.write_at(&tail, end)?;
        // An earlier seal that could not be undone may have left a longer file.
        self.data.set_len(end + tail.len() as u64)
    }
}

/// Why sealing failed, and what that means.
pub enum SealError {
    Undone(Error),
    Terminal(Error),
}

/// Finishes or forgets a seal that a crash cut short.
///
/// The new files are made data first and put in place data first. So with `upper.data` gone, both
/// are to be put in place; an index of its own uuid's data file is to follow it; anything else is
/// from a seal that did not happen.
fn finish_seal(files: &dyn Files, directory: &Path) -> Result<()> {
    let what = || format!("finish the seal of upper {}", directory.display());
    let [data, index] = [data_path(directory), index_path(directory)];
    let (next_data, next_index) = (next_of(&data), next_of(&index));
    let uuid = |path: &Path| -> Result<Option<Uuid>> {
        let Some(blob) = open_existing(files, path).context(what)? else {
            return Ok(None);
        };
        let block = first_block(&*blob).context(what)?;
        Ok(block
            .and_then(|block| Header::decode(&block))
            .and_then(|header| header.uuid))
    };
    if uuid(&data)?.is_none()
        && uuid(&next_data)?.is_some()
        && uuid(&next_data)? == uuid(&next_index)?
    {
        files.rename(&next_data, &data).context(what)?;
    }
    if uuid(&next_index)?.is_some() && uuid(&next_index)? == uuid(&data)? {
        files.rename(&next_index, &index).context(what)?;
    }
    files.remove(&next_index).context(what)?;
    files.remove(&next_data).context(what)
}

fn open_existing(files: &dyn Files, path: &Path) -> std::io::Result<Option<Arc<dyn Blob>>> {
    match files.open(path, Mode::ReadWrite) {
        Ok(blob) => Ok(Some(blob)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The header block; None when the file is too short or there is nothing where the structure should
/// be, as a power failure can leave a file that was never synced.
fn first_block(blob: &(dyn Blob + 'static)) -> std::io::Result<Option<[u8; BLOCK as usize]>> {
    let mut block = [0; BLOCK as usize];
    if blob.len()? < BLOCK {
        return Ok(None);
    }
    blob.read_at(&mut block, 0)?;
    Ok(block[..SECTOR as usize]
        .iter()
        .any(|&byte| byte != 0)
        .then_some(block))
}

/// The map that `entries` entries make, and the first free physical sector. None when one lies
/// outside the image or the data file.
fn replay(
    index: &dyn Blob,
    entries: u64,
    sectors: u64,
    data_end: u64,
) -> std::io::Result<Option<(ExtentMap, u64)>> {
    let mut map = ExtentMap::default();
    let mut next = FIRST_DATA_SECTOR;
    let mut buffer = vec![0; (entries * ENTRY).min(INDEX_CHUNK) as usize];
    let mut at = 0;
    while at < entries * ENTRY {
        let chunk = &mut buffer[..(entries * ENTRY - at).min(INDEX_CHUNK) as usize];
        index.read_at(chunk, BLOCK + at)?;
        at += chunk.len() as u64;
        let (raw, _) = chunk.as_chunks::<{ ENTRY as usize }>();
        for entry in raw
            .iter()
            .map(Entry::from_bytes)
            .filter(|entry| entry.length() > 0)
        {
            let physical_end = entry.physical() + entry.length();
            if entry.end() > sectors {
                return Ok(None);
            }
            let place = if entry.is_zeroed() {
                Place::Zeroed
            } else if entry.physical() < FIRST_DATA_SECTOR || physical_end > data_end {
                return Ok(None);
            } else {
                next = next.max(physical_end);
                Place::Data(entry.physical())
            };
            map.insert(entry.sector()..entry.end(), place);
        }
    }
    Ok(Some((map, next)))
}
