//! Operations on whole trees: making directories, walking, moving, removing.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt, chown, lchown, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, Timestamps, mknodat, utimensat};
use rustix::time::Timespec;

use crate::users::User;

/// Entries of one listing; more would fill the agent's memory.
const LISTING_MAX: usize = 200_000;

/// Makes `path` and its missing parents, mode 0755, owned by `user`. An existing directory is fine.
pub fn make_directories(path: &Path, user: &User) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        make_directories(parent, user)?;
    }
    match fs::create_dir(path) {
        Ok(()) => chown(path, Some(user.uid), Some(user.gid)),
        Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(error) => Err(error),
    }
}

/// Paths below `root`, parents before children, siblings in byte order. Symbolic links are not followed, except `root`.
///
/// Errors: those of reading `root`; what vanishes or cannot be read below it is left out. `FileTooLarge` beyond 200,000 entries.
pub fn walk(root: &Path, depth: u32) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut pending = children(root)?;
    pending.reverse();
    let mut pending: Vec<(PathBuf, u32)> = pending.into_iter().map(|path| (path, 1)).collect();
    while let Some((path, level)) = pending.pop() {
        if found.len() == LISTING_MAX {
            return Err(io::Error::new(
                ErrorKind::FileTooLarge,
                format!("more than {LISTING_MAX} entries"),
            ));
        }
        if level < depth
            && path
                .symlink_metadata()
                .is_ok_and(|metadata| metadata.is_dir())
        {
            let below = children(&path).unwrap_or_default();
            pending.extend(below.into_iter().rev().map(|path| (path, level + 1)));
        }
        found.push(path);
    }
    Ok(found)
}

fn children(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        if names.len() > LISTING_MAX {
            break;
        }
        names.push(entry?.file_name());
    }
    names.sort_unstable();
    Ok(names.into_iter().map(|name| directory.join(name)).collect())
}

/// Removes `path` and everything below. A missing path is fine. On failure a part may be gone.
pub fn remove(path: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Renames `source`; across file systems, copies it beside the destination first, so that the destination appears whole.
///
/// Missing parents of the destination are made for `user`. On failure the source is untouched, and so is the destination.
pub fn rename(source: &Path, destination: &Path, user: &User) -> io::Result<()> {
    fs::symlink_metadata(source)?;
    let parent = destination.parent().unwrap_or(Path::new("/"));
    make_directories(parent, user)?;
    match fs::rename(source, destination) {
        Err(error) if error.kind() == ErrorKind::CrossesDevices => {}
        other => return other,
    }
    let name = destination
        .file_name()
        .ok_or(ErrorKind::InvalidInput)?
        .to_string_lossy();
    let staged = parent.join(format!(".{name}.{}.moving", std::process::id()));
    remove(&staged)?;
    let copied = copy(source, &staged).and_then(|()| fs::rename(&staged, destination));
    if copied.is_err() {
        let _ = remove(&staged);
    }
    copied?;
    remove(source)
}

/// Copies a tree with modes, owners and modification times. Hard links become files of their own.
fn copy(source: &Path, target: &Path) -> io::Result<()> {
    let metadata = fs::symlink_metadata(source)?;
    let kind = metadata.file_type();
    if kind.is_dir() {
        fs::create_dir(target)?;
        for child in children(source)? {
            copy(&child, &target.join(child.file_name().unwrap_or_default()))?;
        }
    } else if kind.is_symlink() {
        symlink(fs::read_link(source)?, target)?;
    } else if kind.is_file() {
        fs::copy(source, target)?;
    } else {
        let kind = match kind {
            kind if kind.is_fifo() => FileType::Fifo,
            kind if kind.is_socket() => FileType::Socket,
            kind if kind.is_block_device() => FileType::BlockDevice,
            _ => FileType::CharacterDevice,
        };
        mknodat(
            CWD,
            target,
            kind,
            Mode::from_raw_mode(metadata.mode() & 0o7777),
            metadata.rdev(),
        )?;
    }
    lchown(target, Some(metadata.uid()), Some(metadata.gid()))?;
    if !kind.is_symlink() {
        // After the change of owner, which clears set-user-id bits.
        fs::set_permissions(target, metadata.permissions())?;
    }
    let time = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
    let times = Timestamps {
        last_access: time(metadata.atime(), metadata.atime_nsec()),
        last_modification: time(metadata.mtime(), metadata.mtime_nsec()),
    };
    Ok(utimensat(CWD, target, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let root = std::env::temp_dir().join(format!("envd-tree-{name}-{}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        root
    }

    #[test]
    fn walks_parents_first_in_order_and_not_through_links() {
        let root = scratch("walk");
        for path in ["b/x/deep", "a"] {
            fs::create_dir_all(root.join(path)).unwrap();
        }
        fs::write(root.join("c.txt"), "").unwrap();
        symlink("..", root.join("b/up")).unwrap();
        let names = |depth| {
            let found = walk(&root, depth).unwrap();
            let relative = found.iter().map(|path| {
                path.strip_prefix(&root)
                    .unwrap()
                    .to_str()
                    .unwrap()
                    .to_owned()
            });
            relative.collect::<Vec<_>>()
        };
        assert_eq!(names(1), ["a", "b", "c.txt"]);
        assert_eq!(names(9), ["a", "b", "b/up", "b/x", "b/x/deep", "c.txt"]);
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_copy_keeps_modes_times_and_links() {
        let root = scratch("copy");
        fs::create_dir_all(root.join("from/dir")).unwrap();
        fs::write(root.join("from/dir/tool"), "#!").unwrap();
        fs::set_permissions(
            root.join("from/dir/tool"),
            std::os::unix::fs::PermissionsExt::from_mode(0o4755),
        )
        .unwrap();
        symlink("dir/tool", root.join("from/link")).unwrap();
        copy(&root.join("from"), &root.join("to")).unwrap();
        let [old, new] =
            ["from", "to"].map(|tree| fs::metadata(root.join(tree).join("dir/tool")).unwrap());
        assert_eq!(
            (old.mode(), old.mtime_nsec()),
            (new.mode(), new.mtime_nsec())
        );
        assert_eq!(
            fs::read_link(root.join("to/link")).unwrap(),
            Path::new("dir/tool")
        );
        remove(&root).unwrap();
        remove(&root).unwrap();
    }
}
