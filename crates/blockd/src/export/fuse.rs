//! The FUSE file system: turns the kernel's requests into calls on images. Never blocks on a lock
//! held across I/O; flushes and waits go to the disk's strand.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyWrite, Request, TimeOrNow, WriteFlags,
};

use crate::error::{Code, Error, Result};
use crate::export::nodes::{Content, Exports, Node};
use crate::export::strand::Strand;
use crate::format::lsmt::SECTOR;
use crate::image::disk::Disk;
use crate::metrics::METRICS;

/// Largest request, bytes.
const MAX_REQUEST: u32 = 1 << 20;
/// Requests the kernel may have under way; its default of 16 halves the speed of deep queues.
const MAX_BACKGROUND: u16 = 512;
/// Attributes never change.
const ATTRIBUTES_TTL: Duration = Duration::from_secs(3600);
/// Names go away with their image, and looking one up is rare.
const NAME_TTL: Duration = Duration::ZERO;

const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;

pub struct FileSystem {
    exports: Arc<Exports>,
}

impl FileSystem {
    pub const fn new(exports: Arc<Exports>) -> Self {
        Self { exports }
    }
}

impl Filesystem for FileSystem {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = InitFlags::FUSE_ASYNC_DIO | InitFlags::FUSE_PARALLEL_DIROPS;
        // A kernel without them is slower, not wrong.
        let _ = config.add_capabilities(wanted & config.capabilities());
        let _ = config.set_max_write(MAX_REQUEST);
        let _ = config.set_max_background(MAX_BACKGROUND);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = name
            .to_str()
            .filter(|_| parent == INodeNo::ROOT)
            .and_then(|name| self.exports.by_name(name));
        match found {
            Some((inode, node)) => {
                reply.entry_with_ttls(
                    &ATTRIBUTES_TTL,
                    &NAME_TTL,
                    &attributes(inode, &node),
                    Generation(0),
                );
            }
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        if inode == INodeNo::ROOT {
            return reply.attr(&ATTRIBUTES_TTL, &root_attributes());
        }
        match self.exports.by_inode(inode.0) {
            Some(node) => reply.attr(&ATTRIBUTES_TTL, &attributes(inode.0, &node)),
            None => reply.error(Errno::ESTALE),
        }
    }

    fn setattr(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        _size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        reply.error(Errno::EPERM);
    }

    fn opendir(&self, _request: &Request, _inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        // Not even for root: names are what keeps one VMM from another's disk.
        reply.error(Errno::EACCES);
    }

    fn open(&self, _request: &Request, inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let Some(node) = self.exports.by_inode(inode.0) else {
            return reply.error(Errno::ESTALE);
        };
        let flags = match node.content {
            Content::Memory(_) => FopenFlags::FOPEN_KEEP_CACHE,
            _ => FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES,
        };
        // Closing flushes nothing: durability is fsync's business.
        reply.opened(FileHandle(0), flags | FopenFlags::FOPEN_NOFLUSH);
    }

    fn read(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let Some(node) = self.exports.by_inode(inode.0) else {
            return reply.error(Errno::ESTALE);
        };
        let length = u64::from(size.min(MAX_REQUEST)).min(node.size().saturating_sub(offset));
        if !offset.is_multiple_of(SECTOR) || length % SECTOR != 0 {
            return reply.error(Errno::EINVAL);
        }
        let length = length as usize;
        match node.content {
            Content::Disk(disk, _) => send(reply, length, |buffer| disk.read(offset, buffer)),
            Content::FrozenDisk(frozen) | Content::Memory(frozen) => {
                frozen.read(move |stack| match stack {
                    Ok(stack) => send(reply, length, |buffer| stack.read(offset, buffer)),
                    Err(error) => reply.error(errno(&error)),
                })
            }
        }
    }

    fn write(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let (disk, strand) = match self.exports.by_inode(inode.0).map(|node| node.content) {
            None => return reply.error(Errno::ESTALE),
            Some(Content::Disk(disk, strand)) => (disk, strand),
            Some(_) => return reply.error(Errno::EROFS),
        };
        if !aligned(offset, data.len() as u64) {
            return reply.error(Errno::EINVAL);
        }
        if offset + data.len() as u64 > disk.size() {
            return reply.error(Errno::ENOSPC);
        }
        let length = data.len();
        // While a seal has the gate, the write waits its turn elsewhere.
        let now = disk.try_gate().map(|gate| disk.write(&gate, offset, data));
        if let Some(done) = now {
            return finish_write(disk, &strand, reply, length, done);
        }
        let data = data.to_vec();
        strand.clone().submit(move || {
            let done = disk.write(&disk.gate(), offset, &data);
            finish_write(disk, &strand, reply, length, done);
        });
    }

    fn fallocate(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let content = self.exports.by_inode(inode.0).map(|node| node.content);
        let (disk, strand) = match content {
            None => return reply.error(Errno::ESTALE),
            // Free page reporting: the VMM punches its memory file before it drops its own page. It
            // must go on, and the image stay as it is.
            Some(Content::Memory(_)) if mode == PUNCH_HOLE => return reply.ok(),
            Some(Content::Memory(_) | Content::FrozenDisk(_)) => return reply.error(Errno::EROFS),
            Some(Content::Disk(disk, strand)) => (disk, strand),
        };
        let zeroing =
            mode & !libc::FALLOC_FL_KEEP_SIZE == libc::FALLOC_FL_ZERO_RANGE || mode == PUNCH_HOLE;
        if !zeroing {
            return reply.error(Errno::EOPNOTSUPP);
        }
        if !aligned(offset, length) {
            return reply.error(Errno::EINVAL);
        }
        let end = offset + length;
        if end > disk.size() && mode == libc::FALLOC_FL_ZERO_RANGE {
            return reply.error(Errno::EFBIG);
        }
        let length = end.min(disk.size()).saturating_sub(offset);
        match disk.try_gate().map(|gate| disk.zero(&gate, offset, length)) {
            Some(done) => answer_zero(reply, done),
            None => strand.submit(move || {
                answer_zero(reply, disk.zero(&disk.gate(), offset, length));
            }),
        }
    }

    fn fsync(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        _data: bool,
        reply: ReplyEmpty,
    ) {
        match self.exports.by_inode(inode.0).map(|node| node.content) {
            None => reply.error(Errno::ESTALE),
            Some(Content::Disk(disk, strand)) => strand.submit(move || match disk.flush() {
                Ok(()) => {
                    METRICS.flushes.fetch_add(1, Ordering::Relaxed);
                    reply.ok();
                }
                Err(error) => reply.error(errno(&error)),
            }),
            Some(_) => reply.ok(),
        }
    }
}

/// Answers a write, after the write-out that may be due.
fn finish_write(
    disk: Arc<Disk>,
    strand: &Strand,
    reply: ReplyWrite,
    length: usize,
    done: Result<bool>,
) {
    let answer = move |reply: ReplyWrite, done: Result<()>| match done {
        Ok(()) => {
            METRICS.writes.fetch_add(1, Ordering::Relaxed);
            METRICS
                .written_bytes
                .fetch_add(length as u64, Ordering::Relaxed);
            // At most MAX_REQUEST.
            reply.written(length as u32);
        }
        Err(error) => reply.error(errno(&error)),
    };
    match done {
        Ok(true) => strand.submit(move || answer(reply, disk.write_out())),
        done => answer(reply, done.map(|_| ())),
    }
}

fn answer_zero(reply: ReplyEmpty, done: Result<()>) {
    match done {
        Ok(()) => {
            METRICS.discards.fetch_add(1, Ordering::Relaxed);
            reply.ok();
        }
        Err(error) => reply.error(errno(&error)),
    }
}

/// Answers a read of `length` bytes that `fill` makes, in this thread's buffer.
fn send(reply: ReplyData, length: usize, fill: impl FnOnce(&mut [u8]) -> Result<()>) {
    thread_local! {
        static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    BUFFER.with_borrow_mut(|buffer| {
        if buffer.len() < length {
            buffer.resize(length, 0);
        }
        match fill(&mut buffer[..length]) {
            Ok(()) => {
                METRICS.reads.fetch_add(1, Ordering::Relaxed);
                METRICS
                    .read_bytes
                    .fetch_add(length as u64, Ordering::Relaxed);
                reply.data(&buffer[..length]);
            }
            Err(error) => reply.error(errno(&error)),
        }
    });
}

/// Whole sectors, without an overflow.
fn aligned(offset: u64, length: u64) -> bool {
    offset.is_multiple_of(SECTOR)
        && length.is_multiple_of(SECTOR)
        && offset.checked_add(length).is_some()
}

fn errno(error: &Error) -> Errno {
    if !matches!(error.code, Code::Invalid | Code::NoSpace) {
        log::error!("I/O failed: {error}");
    }
    match error.code {
        Code::Invalid => Errno::EINVAL,
        Code::NoSpace => Errno::ENOSPC,
        _ => Errno::EIO,
    }
}

fn attributes(inode: u64, node: &Node) -> FileAttr {
    FileAttr {
        size: node.size(),
        blocks: node.size() / SECTOR,
        kind: FileType::RegularFile,
        perm: node.mode(),
        nlink: 1,
        uid: node.uid,
        gid: node.uid,
        ..root_attributes_of(INodeNo(inode))
    }
}

fn root_attributes() -> FileAttr {
    root_attributes_of(INodeNo::ROOT)
}

/// A directory that can be passed through but not listed.
fn root_attributes_of(ino: INodeNo) -> FileAttr {
    FileAttr {
        ino,
        size: 0,
        blocks: 0,
        atime: SystemTime::UNIX_EPOCH,
        mtime: SystemTime::UNIX_EPOCH,
        ctime: SystemTime::UNIX_EPOCH,
        crtime: SystemTime::UNIX_EPOCH,
        kind: FileType::Directory,
        perm: 0o711,
        nlink: 2,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}
