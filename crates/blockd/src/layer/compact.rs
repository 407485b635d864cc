//! Several layers as one: what they hide of each other is dropped. In the background, so slowly: one
//! thread, little memory, nothing left to the kernel to write out later.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::{Context, Error, Result};
use crate::format::lsmt::{Entry, SECTOR};
use crate::layer::index::push_joined;
use crate::layer::sealed::{Layer, LayerStore};
use crate::layer::stack::Stack;
use crate::layer::writer::{LayerWriter, Written};

/// Read and written at a time, bytes.
const BATCH: u64 = 1 << 20;
/// Written out before more is written, bytes.
const WRITE_OUT: u64 = 8 << 20;

/// Body of `POST /layers/compact`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompactRequest {
    /// Neighbours in a stack, bottom to top.
    pub layers: Vec<PathBuf>,
    pub layer: PathBuf,
    /// Nothing lies below them, so that zeroed mappings need not be kept.
    #[serde(default)]
    pub bottom: bool,
}

/// What became of the layers.
pub struct Compacted {
    pub written: Written,
    /// Of all the layers, data that was hidden included.
    pub before_bytes: u64,
}

/// Makes a layer that may stand in their place: of equal content, and of the uuid of the topmost,
/// which an upper on it knows it by. It is on stable storage. After a failure there is none.
pub fn compact(store: &LayerStore, request: &CompactRequest) -> Result<Compacted> {
    if request.layers.is_empty() {
        return Err(Error::invalid("no layers to compact"));
    }
    let stack = Stack::open(store, &request.layers)?;
    let work = || {
        lower_priority();
        write(store, &stack, &request.layer, request.bottom)
    };
    // Its own thread, since a priority cannot be raised again.
    let written = std::thread::scope(|scope| {
        let thread = scope.spawn(work);
        thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    // On stable storage before anybody removes what it stands for.
    let synced = store
        .open(&written.path)
        .and_then(|layer| layer.sync(&**store.files()));
    if let Err(error) = synced {
        if let Err(error) = store.files().remove(&written.path) {
            log::warn!("remove {}: {error}", written.path.display());
        }
        return Err(error);
    }
    let sizes = stack.layers().iter().map(|layer| layer.size_bytes);
    Ok(Compacted {
        written,
        before_bytes: sizes.sum(),
    })
}

fn write(store: &LayerStore, stack: &Stack, path: &Path, bottom: bool) -> Result<Written> {
    let uuid = stack.layers().last().and_then(|layer| layer.uuid);
    let mut writer = LayerWriter::create(store.files().clone(), path, stack.virtual_size())?;
    if let Some(uuid) = uuid {
        writer.set_uuid(uuid)?;
    }
    let mut batch = Batch {
        writer: &writer,
        buffer: vec![0; BATCH as usize],
        filled: 0,
        entries: Vec::new(),
        not_out: 0,
    };
    for entry in stack.merged() {
        if !entry.is_zeroed() {
            batch.copy(&stack.layers()[usize::from(entry.tag())], *entry)?;
        } else if !bottom {
            batch.push(entry.with_tag(0));
        }
    }
    batch.write()?;
    writer.finish()
}

struct Batch<'a> {
    writer: &'a LayerWriter,
    buffer: Vec<u8>,
    /// Bytes.
    filled: u64,
    /// Physical sectors count from the start of the buffer.
    entries: Vec<Entry>,
    /// Bytes written and perhaps not on disk.
    not_out: u64,
}

impl Batch<'_> {
    fn copy(&mut self, layer: &Layer, entry: Entry) -> Result<()> {
        let mut at = entry.sector();
        while at < entry.end() {
            if self.filled == BATCH {
                self.write()?;
            }
            let end = entry.end().min(at + (BATCH - self.filled) / SECTOR);
            let part = entry.slice(at, end);
            let length = part.length() * SECTOR;
            let target = &mut self.buffer[self.filled as usize..(self.filled + length) as usize];
            layer
                .blob
                .read_at(target, part.physical() * SECTOR)
                .context(|| format!("read layer {}", layer.path.display()))?;
            self.push(Entry::data(at, part.length(), self.filled / SECTOR));
            self.filled += length;
            at = end;
        }
        Ok(())
    }

    fn push(&mut self, entry: Entry) {
        push_joined(&mut self.entries, entry);
    }

    fn write(&mut self) -> Result<()> {
        let data = &self.buffer[..self.filled as usize];
        self.writer.append(data, &self.entries)?;
        self.not_out += self.filled;
        self.filled = 0;
        self.entries.clear();
        if self.not_out >= WRITE_OUT {
            self.writer.write_out(self.not_out)?;
            self.not_out = 0;
        }
        Ok(())
    }
}

/// The calling thread's I/O goes behind that of others, as far as the host's scheduler cares.
fn lower_priority() {
    const WHO_PROCESS: libc::c_int = 1;
    const BEST_EFFORT: libc::c_int = 2 << 13;
    const LOWEST: libc::c_int = 7;
    // SAFETY: plain numbers; 0 is the calling thread. Failing leaves the priority as it was.
    unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, BEST_EFFORT | LOWEST) };
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::backend::Files;
    use crate::error::Code;
    use crate::testing::{MemoryFiles, Random};

    const SIZE: u64 = 4 << 20;

    fn random_layer(files: &Arc<MemoryFiles>, path: &Path, random: &mut Random) {
        let writer = LayerWriter::create(files.clone(), path, SIZE).unwrap();
        let mut at = 0;
        loop {
            at += random.below(200);
            let length = 1 + random.below(300);
            if at + length > SIZE / SECTOR {
                break;
            }
            if random.below(4) == 0 {
                writer.append(&[], &[Entry::zeroed(at, length)]).unwrap();
            } else {
                let data: Vec<u8> = (0..length * SECTOR).map(|_| random.next() as u8).collect();
                writer.append(&data, &[Entry::data(at, length, 0)]).unwrap();
            }
            at += length;
        }
        writer.finish().unwrap();
    }

    fn content(store: &LayerStore, layers: &[PathBuf]) -> Vec<u8> {
        let mut image = vec![0xaa; SIZE as usize];
        let stack = Stack::open(store, layers).unwrap();
        stack.read(0, &mut image).unwrap();
        image
    }

    fn setting(seed: u64) -> (Arc<MemoryFiles>, LayerStore, Vec<PathBuf>) {
        let (files, mut random) = (MemoryFiles::new(), Random::new(seed));
        let paths: Vec<PathBuf> = (0..6).map(|number| format!("/{number}").into()).collect();
        for path in &paths {
            random_layer(&files, path, &mut random);
        }
        (files.clone(), LayerStore::new(files), paths)
    }

    #[test]
    fn a_compacted_stack_reads_equal_and_keeps_the_uuid_on_top() {
        for seed in 0..12 {
            let (_, store, paths) = setting(seed);
            let expected = content(&store, &paths);
            let (from, to) = [(0, 6), (0, 3), (2, 5), (3, 6), (4, 5), (0, 1)][seed as usize % 6];
            let request = CompactRequest {
                layers: paths[from..to].to_vec(),
                layer: "/one".into(),
                bottom: from == 0 && seed < 6,
            };
            let done = compact(&store, &request).unwrap();
            let mut layers = paths.clone();
            layers.splice(from..to, [request.layer.clone()]);
            assert!(content(&store, &layers) == expected, "{from}..{to}");
            let one = store.open(&request.layer).unwrap();
            assert_eq!(one.uuid, store.open(&paths[to - 1]).unwrap().uuid);
            assert_eq!(one.virtual_size, SIZE);
            assert!(!request.bottom || one.index.iter().all(|entry| !entry.is_zeroed()));
            // Index padding aside.
            assert!(done.written.size_bytes <= done.before_bytes + 8192);
            let again = compact(&store, &request).err().map(|error| error.code);
            assert_eq!(again, Some(Code::Conflict));
        }
    }

    #[test]
    fn a_failure_anywhere_leaves_what_was_there() {
        let (files, store, paths) = setting(1);
        let (names, expected) = (files.names(), content(&store, &paths));
        let request = CompactRequest {
            layers: paths[1..5].to_vec(),
            layer: "/one".into(),
            bottom: false,
        };
        let mut failures = 0;
        for count in 1.. {
            files.fail_at(count);
            let done = compact(&store, &request);
            if !files.has_failed() {
                files.fail_at(0);
                done.unwrap();
                break;
            }
            assert!(done.is_err());
            assert_eq!(files.names(), names);
            failures += 1;
        }
        assert!(failures >= 5, "{failures}");
        files.remove(Path::new("/one")).unwrap();
        files.fail_syncs();
        assert!(compact(&store, &request).is_err());
        assert_eq!(files.names(), names);
        assert!(content(&store, &paths) == expected);
    }
}
