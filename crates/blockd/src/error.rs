//! The one error type: a code the API maps to a status, what failed, and what to do.

use std::fmt;
use std::io;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// The request is malformed or out of range.
    Invalid,
    NotFound,
    /// The state of the thing does not allow it.
    Conflict,
    /// A layer or upper is not what it should be.
    Corrupt,
    Io,
    NoSpace,
    /// The image was changed and cannot go on.
    Terminal,
}

impl Code {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::NotFound => "not_found",
            Self::Conflict => "conflict",
            Self::Corrupt => "corrupt",
            Self::Io => "io",
            Self::NoSpace => "no_space",
            Self::Terminal => "terminal",
        }
    }
}

#[derive(Clone, Debug)]
pub struct Error {
    pub code: Code,
    pub message: String,
    /// What to do about it; may be empty.
    pub hint: String,
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            hint: String::new(),
        }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::Invalid, message)
    }

    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(Code::Conflict, message)
    }

    pub fn corrupt(message: impl Into<String>) -> Self {
        Self::new(Code::Corrupt, message)
    }

    /// `what` failed with `cause`, whose kind gives the code.
    pub fn io(what: impl fmt::Display, cause: &io::Error) -> Self {
        let (code, hint) = match cause.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => (Code::NoSpace, "free space on the host's disk"),
            Some(libc::ENOENT) => (Code::NotFound, ""),
            Some(libc::EEXIST) => (
                Code::Conflict,
                "give another path; sealed layers are never overwritten",
            ),
            Some(libc::EACCES | libc::EPERM) => (
                Code::Io,
                "the directory must be writable by the uid blockd runs as",
            ),
            // Of content that is not what its wrapping says.
            _ if cause.kind() == io::ErrorKind::InvalidData => (Code::Corrupt, ""),
            _ => (Code::Io, ""),
        };
        Self {
            code,
            message: format!("{what}: {cause}"),
            hint: hint.into(),
        }
    }

    pub fn with_hint(self, hint: impl Into<String>) -> Self {
        Self {
            hint: hint.into(),
            ..self
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.message)
    }
}

impl std::error::Error for Error {}

/// Turns an I/O result into one of ours, saying what was attempted.
pub trait Context<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Context<T> for io::Result<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|cause| Error::io(what(), &cause))
    }
}
