//! Counters of this process, and their Prometheus text.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub static METRICS: Metrics = Metrics::new();

pub struct Counter(AtomicU64);

impl Counter {
    const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    pub fn add(&self) {
        self.0.fetch_add(1, Relaxed);
    }

    /// For gauges: until the returned guard is dropped.
    pub fn during(&'static self) -> Present {
        self.add();
        Present(self)
    }
}

pub struct Present(&'static Counter);

impl Drop for Present {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Relaxed);
    }
}

macro_rules! metrics {
    ($($field:ident $kind:literal $name:literal $help:literal),* $(,)?) => {
        pub struct Metrics { $(pub $field: Counter),* }

        impl Metrics {
            const fn new() -> Self {
                Self { $($field: Counter::new()),* }
            }

            pub fn prometheus(&self, routes: usize) -> String {
                let mut text = String::new();
                let rows = [
                    $(($name, $kind, $help, self.$field.0.load(Relaxed))),*,
                    ("aenv_edge_routes", "gauge", "Routes in the table.", routes as u64),
                ];
                for (name, kind, help, value) in rows {
                    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
                }
                text
            }
        }
    };
}

metrics! {
    clients "gauge" "aenv_edge_client_connections" "Open client connections.",
    clients_refused "counter" "aenv_edge_client_connections_refused_total" "Client connections over the limit.",
    to_control "counter" "aenv_edge_control_requests_total" "Requests for the control plane.",
    to_sandboxes "counter" "aenv_edge_sandbox_requests_total" "Requests for sandboxes.",
    tunnels "gauge" "aenv_edge_tunnels" "Upgraded connections.",
    not_found "counter" "aenv_edge_sandbox_not_found_total" "Requests for sandboxes unknown or paused.",
    port_closed "counter" "aenv_edge_port_closed_total" "Requests for ports nobody listens on.",
    refused "counter" "aenv_edge_refused_total" "Requests malformed or without the right token.",
    broken "counter" "aenv_edge_upstream_failures_total" "Upstream connections lost before an answer.",
    control_down "counter" "aenv_edge_control_unavailable_total" "Requests the control plane did not answer.",
    cut "counter" "aenv_edge_cut_total" "Exchanges cut because their route ended or their answer broke off.",
    connects "counter" "aenv_edge_upstream_connects_total" "Upstream connections opened.",
    reuses "counter" "aenv_edge_upstream_reuses_total" "Upstream connections used again.",
    retries "counter" "aenv_edge_upstream_retries_total" "Requests sent again because a pooled connection was stale.",
}
