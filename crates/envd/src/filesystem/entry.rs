//! What a directory entry looks like to clients.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use buffa_types::google::protobuf::Timestamp;

use crate::proto::filesystem::{EntryInfo, FileType};
use crate::users::Accounts;

/// Describes `path`, which is reported as given.
///
/// A symbolic link has the type and mode of what it leads to (no type when it leads nowhere), and the size and permissions of
/// its own. `is_symlink` stays false: SDKs that look at it would stop seeing the target's type.
pub fn describe(path: &Path, accounts: &Accounts) -> io::Result<EntryInfo> {
    let own = fs::symlink_metadata(path)?;
    let is_link = own.file_type().is_symlink();
    let target = if is_link {
        fs::metadata(path).ok()
    } else {
        Some(own.clone())
    };
    let name = path.file_name().unwrap_or(path.as_os_str());
    Ok(EntryInfo {
        name: name.to_string_lossy().into_owned(),
        r#type: target.as_ref().map(file_type).unwrap_or_default().into(),
        path: path.to_string_lossy().into_owned(),
        size: i64::try_from(own.len()).unwrap_or(i64::MAX),
        mode: target.as_ref().unwrap_or(&own).mode() & 0o777,
        permissions: permissions(&own),
        owner: accounts.user_name(own.uid()),
        group: accounts.group_name(own.gid()),
        modified_time: Timestamp {
            seconds: own.mtime(),
            nanos: own.mtime_nsec() as i32,
            ..Default::default()
        }
        .into(),
        symlink_target: is_link.then(|| link_target(path)),
        ..Default::default()
    })
}

fn file_type(metadata: &Metadata) -> FileType {
    if metadata.is_dir() {
        FileType::FILE_TYPE_DIRECTORY
    } else if metadata.is_file() {
        FileType::FILE_TYPE_FILE
    } else {
        FileType::FILE_TYPE_UNSPECIFIED
    }
}

/// Where the link leads in the end, absolute; where it points, when that is nowhere.
fn link_target(path: &Path) -> String {
    let pointed = || {
        let target = fs::read_link(path).unwrap_or_default();
        path.parent().unwrap_or(Path::new("/")).join(target)
    };
    fs::canonicalize(path)
        .unwrap_or_else(|_| pointed())
        .to_string_lossy()
        .into_owned()
}

/// Kind letters and the nine permission letters, in the notation of Go's `fs.FileMode`, which SDK clients know from E2B.
fn permissions(metadata: &Metadata) -> String {
    let (kind, mode) = (metadata.file_type(), metadata.mode());
    let flags = [
        ('d', kind.is_dir()),
        ('L', kind.is_symlink()),
        ('D', kind.is_block_device() || kind.is_char_device()),
        ('p', kind.is_fifo()),
        ('S', kind.is_socket()),
        ('u', mode & 0o4000 != 0),
        ('g', mode & 0o2000 != 0),
        ('c', kind.is_char_device()),
        ('t', mode & 0o1000 != 0),
    ];
    let mut text: String = flags
        .iter()
        .filter(|(_, set)| *set)
        .map(|(letter, _)| letter)
        .collect();
    if text.is_empty() {
        text.push('-');
    }
    let bits = (0..9).map(|bit| {
        if mode & (0o400 >> bit) == 0 {
            '-'
        } else {
            ['r', 'w', 'x'][bit % 3]
        }
    });
    text.extend(bits);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn describes_files_directories_and_links() {
        let root = std::env::temp_dir().join(format!("envd-entry-{}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        let file = root.join("file");
        fs::write(&file, "12345").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        symlink("file", root.join("link")).unwrap();
        symlink("nowhere", root.join("broken")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        let describe = |name: &str| describe(&root.join(name), &Accounts::default()).unwrap();

        let entry = describe("file");
        assert_eq!(
            (entry.size, entry.mode, entry.permissions.as_str()),
            (5, 0o644, "-rw-r--r--")
        );
        assert_eq!(entry.r#type, FileType::FILE_TYPE_FILE);
        let link = describe("link");
        assert_eq!(
            (link.size, link.mode, link.permissions.as_str()),
            (4, 0o644, "Lrwxrwxrwx")
        );
        assert_eq!(link.r#type, FileType::FILE_TYPE_FILE);
        assert_eq!(
            link.symlink_target.as_deref(),
            fs::canonicalize(&file).unwrap().to_str()
        );
        for broken in ["broken", "loop"] {
            assert_eq!(
                describe(broken).r#type,
                FileType::FILE_TYPE_UNSPECIFIED,
                "{broken}"
            );
        }
        fs::set_permissions(&root, fs::Permissions::from_mode(0o1777)).unwrap();
        assert_eq!(describe("").permissions, "dtrwxrwxrwx");
        fs::remove_dir_all(&root).unwrap();
    }
}
