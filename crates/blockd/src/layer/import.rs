//! Files as layers: the sparse file in which a VMM saved its dirty pages, and raw disk images.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use serde::Deserialize;

use crate::backend::Files;
use crate::error::{Context, Error, Result};
use crate::format::lsmt::{MAX_VIRTUAL_SIZE, SECTOR};
use crate::layer::writer::Written;
use crate::memory::pages::{Copied, PAGE, Source, ZeroPages, check_memory_size, make_layer};

/// Body of `POST /memory/import`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiffRequest {
    pub diff: Option<PathBuf>,
    pub layer: PathBuf,
    size: u64,
}

/// The data extents of a sparse file as a layer.
pub fn import_diff(
    files: Arc<dyn Files>,
    request: DiffRequest,
    descriptors: Vec<OwnedFd>,
) -> Result<(Written, Copied)> {
    check_memory_size(request.size)?;
    let source = SparseFile::open(request.diff, descriptors)?;
    if source.length > request.size {
        return Err(Error::invalid(format!(
            "{}: longer than the memory",
            source.path.display()
        )));
    }
    make_layer(files, &request.layer, request.size, &source, ZeroPages::Map)
}

/// A file, page-wise; what is missing of its last page is zeros.
pub struct SparseFile {
    file: File,
    path: PathBuf,
    /// Bytes.
    pub length: u64,
}

impl SparseFile {
    /// The file at `path`, or else the one that came as the only descriptor: its opener may read
    /// what blockd may not.
    pub fn open(path: Option<PathBuf>, descriptors: Vec<OwnedFd>) -> Result<Self> {
        let passed = <[OwnedFd; 1]>::try_from(descriptors).ok();
        let (path, file) = match (path, passed) {
            (Some(path), None) => {
                let file = File::open(&path).context(|| format!("open {}", path.display()))?;
                (path, file)
            }
            (None, Some([descriptor])) => ("the file passed".into(), File::from(descriptor)),
            _ => {
                return Err(Error::invalid(
                    "a file to read comes as a path or as one descriptor",
                ));
            }
        };
        let metadata = file
            .metadata()
            .context(|| format!("open {}", path.display()))?;
        if !metadata.is_file() {
            return Err(Error::invalid(format!(
                "{}: not a regular file",
                path.display()
            )));
        }
        Ok(Self {
            file,
            path,
            length: metadata.len(),
        })
    }

    /// The next data (`SEEK_DATA`) or hole (`SEEK_HOLE`) from `offset` on; the end of the file if
    /// there is none.
    fn seek(&self, offset: u64, whence: i32) -> Result<u64> {
        // SAFETY: a call on a descriptor we own; no memory is passed. No one relies on the file's
        // position.
        let found = unsafe { libc::lseek(self.file.as_raw_fd(), offset.cast_signed(), whence) };
        if let Ok(found) = u64::try_from(found) {
            return Ok(found);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ENXIO) => Ok(self.length),
            _ => Err(Error::io(
                format!("seek in {}", self.path.display()),
                &error,
            )),
        }
    }
}

impl Source for SparseFile {
    fn ranges(&self) -> Vec<Range<u64>> {
        std::iter::once(0..self.length.next_multiple_of(PAGE)).collect()
    }

    fn extents(&self, window: Range<u64>) -> Result<Vec<Range<u64>>> {
        let mut extents: Vec<Range<u64>> = Vec::new();
        let mut at = window.start;
        while at < window.end.min(self.length) {
            let data = self.seek(at, libc::SEEK_DATA)?;
            if data >= window.end.min(self.length) {
                break;
            }
            // Beyond `data` even when the file is being changed, so that this loop ends.
            let hole = self.seek(data, libc::SEEK_HOLE)?.max(data + 1);
            // Whole pages, whatever the block size of the file system.
            let start = (data / PAGE * PAGE).max(at);
            let end = hole.next_multiple_of(PAGE).min(window.end);
            match extents.last_mut().filter(|last| last.end == start) {
                Some(last) => last.end = end,
                None => extents.push(start..end),
            }
            at = end;
        }
        Ok(extents)
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let there = (buffer.len() as u64).min(self.length.saturating_sub(offset)) as usize;
        let (content, rest) = buffer.split_at_mut(there);
        rest.fill(0);
        self.file
            .read_exact_at(content, offset)
            .context(|| format!("read {}", self.path.display()))
    }
}

/// Body of `POST /layers/import`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawRequest {
    pub raw: Option<PathBuf>,
    pub layer: PathBuf,
}

/// A raw image as a base layer, and its virtual size: that of the file, rounded up to whole
/// sectors.
pub fn import_raw(
    files: Arc<dyn Files>,
    request: RawRequest,
    descriptors: Vec<OwnedFd>,
) -> Result<(Written, u64)> {
    let source = SparseFile::open(request.raw, descriptors)?;
    let size = source.length.next_multiple_of(SECTOR);
    if size == 0 || size > MAX_VIRTUAL_SIZE {
        return Err(Error::invalid(format!(
            "{}: empty, or too large for an image",
            source.path.display()
        )));
    }
    let (written, _) = make_layer(files, &request.layer, size, &source, ZeroPages::Omit)?;
    Ok((written, size))
}
