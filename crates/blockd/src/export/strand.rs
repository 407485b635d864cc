//! One disk's share of the pool: its jobs run one after the other, so that a guest with many flushes
//! under way cannot keep other disks' waiting.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::pool::Pool;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Whether the pool has been told to run the first of them.
    scheduled: bool,
}

#[derive(Clone)]
pub struct Strand {
    pool: Arc<Pool>,
    queue: Arc<Mutex<Queue>>,
}

impl Strand {
    pub fn new(pool: Arc<Pool>) -> Self {
        Self {
            pool,
            queue: Arc::default(),
        }
    }

    /// Runs `job` after those submitted before.
    pub fn submit(&self, job: impl FnOnce() + Send + 'static) {
        let mut queue = self.queue.lock();
        queue.jobs.push_back(Box::new(job));
        if !queue.scheduled {
            queue.scheduled = true;
            self.schedule();
        }
    }

    /// One job a turn: strands share the pool fairly.
    fn schedule(&self) {
        let strand = self.clone();
        self.pool.submit(move || {
            let job = strand.queue.lock().jobs.pop_front();
            if let Some(job) = job {
                job();
            }
            let mut queue = strand.queue.lock();
            queue.scheduled = !queue.jobs.is_empty();
            if queue.scheduled {
                strand.schedule();
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn jobs_run_in_order_and_a_blocked_strand_blocks_no_other() {
        let pool = Arc::new(Pool::new(2).unwrap());
        let (blocked, free) = (Strand::new(pool.clone()), Strand::new(pool));
        let (release, wait) = channel::<()>();
        let (done, results) = channel();
        let first = done.clone();
        blocked.submit(move || {
            wait.recv().unwrap();
            first.send(0).unwrap();
        });
        for number in 1..100 {
            let done = done.clone();
            blocked.submit(move || done.send(number).unwrap());
        }
        let (other, other_results) = channel();
        free.submit(move || other.send(()).unwrap());
        other_results.recv().unwrap();
        release.send(()).unwrap();
        assert_eq!(
            results.iter().take(100).collect::<Vec<_>>(),
            (0..100).collect::<Vec<_>>()
        );
    }
}
