//! Reading and replacing small files whose place in the image belongs to the sandbox, who may have put anything there.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

const LIMIT_BYTES: u64 = 1 << 20;

/// At most the first MiB of a regular file. Never waits on a FIFO or a terminal.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file",
        ));
    }
    let mut content = Vec::new();
    file.take(LIMIT_BYTES).read_to_end(&mut content)?;
    Ok(content)
}

/// Puts a world-readable file at `path`, whatever was there: a symbolic link is replaced, not followed. Its directory is made if
/// missing. On failure the old file is untouched.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    std::fs::create_dir_all(directory)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let staged = directory.join(format!(".{name}.envd"));
    let written = File::create(&staged).and_then(|mut file| {
        file.write_all(content)?;
        file.set_permissions(Permissions::from_mode(0o644))?;
        std::fs::rename(&staged, path)
    });
    if written.is_err() {
        let _ = std::fs::remove_file(&staged);
    }
    written
}
