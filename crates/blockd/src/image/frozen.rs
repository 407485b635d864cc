//! A read-only image that may still wait for its stack.

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::layer::stack::Stack;

type Read = Box<dyn FnOnce(Result<&Stack>) + Send>;

#[derive(Default)]
struct Waiting {
    reads: Vec<Read>,
    closed: bool,
}

pub struct Frozen {
    /// Bytes.
    pub size: u64,
    stack: OnceLock<Stack>,
    waiting: Mutex<Waiting>,
}

impl Frozen {
    pub fn new(stack: Stack, size: u64) -> Self {
        Self {
            size,
            stack: OnceLock::from(stack),
            waiting: Mutex::default(),
        }
    }

    pub fn pending(size: u64) -> Self {
        Self {
            size,
            stack: OnceLock::new(),
            waiting: Mutex::default(),
        }
    }

    /// None while pending.
    pub fn stack(&self) -> Option<&Stack> {
        self.stack.get()
    }

    /// Runs `read` with the stack: now if there is one, else from [`Self::complete`] or
    /// [`Self::close`].
    pub fn read(&self, read: impl FnOnce(Result<&Stack>) + Send + 'static) {
        if let Some(stack) = self.stack() {
            return read(Ok(stack));
        }
        let mut waiting = self.waiting.lock();
        // Decided under the lock that `complete` and `close` take, so that no read is left behind.
        match self.stack() {
            Some(stack) => {
                drop(waiting);
                read(Ok(stack));
            }
            None if waiting.closed => read(Err(closed())),
            None => waiting.reads.push(Box::new(read)),
        }
    }

    /// Gives a pending image its stack. Returns the work of answering the reads that waited, to be
    /// done in any order on any thread.
    ///
    /// # Errors
    /// `conflict` when it has another stack already.
    pub fn complete(self: &Arc<Self>, stack: Stack) -> Result<Vec<impl FnOnce() + Send + use<>>> {
        let mut waiting = self.waiting.lock();
        if let Err(stack) = self.stack.set(stack) {
            if self.stack().is_some_and(|known| known.same_layers(&stack)) {
                return Ok(Vec::new());
            }
            return Err(Error::conflict("the image has other layers already"));
        }
        let reads = std::mem::take(&mut waiting.reads);
        let answer = |read: Read| {
            let image = self.clone();
            move || read(image.stack().ok_or_else(closed))
        };
        Ok(reads.into_iter().map(answer).collect())
    }

    /// Reads that still wait are answered with an error, and later ones too.
    pub fn close(&self) {
        let mut waiting = self.waiting.lock();
        waiting.closed = true;
        let reads = std::mem::take(&mut waiting.reads);
        drop(waiting);
        for read in reads {
            read(Err(closed()));
        }
    }
}

fn closed() -> Error {
    Error::conflict("the image was closed before it got its layers")
}
