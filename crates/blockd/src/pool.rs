//! A few threads for work that may block, so that those serving FUSE requests never do.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use parking_lot::Mutex;

type Job = Box<dyn FnOnce() + Send>;

/// Jobs start in the order they were submitted. Dropping the pool lets the queued ones finish.
pub struct Pool {
    queue: Mutex<Sender<Job>>,
}

impl Pool {
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let (queue, jobs) = channel();
        let jobs = Arc::new(Mutex::new(jobs));
        for number in 0..threads {
            let jobs = jobs.clone();
            std::thread::Builder::new()
                .name(format!("pool-{number}"))
                .spawn(move || work(&jobs))?;
        }
        Ok(Self {
            queue: Mutex::new(queue),
        })
    }

    pub fn submit(&self, job: impl FnOnce() + Send + 'static) {
        // Fails only when all threads have died of panics; the job's drop then answers its request
        // with an error.
        let _ = self.queue.lock().send(Box::new(job));
    }
}

fn work(jobs: &Mutex<Receiver<Job>>) {
    loop {
        let next = jobs.lock().recv();
        match next {
            Ok(job) => job(),
            Err(_) => return,
        }
    }
}
