//! What all of the agent shares: settings the node gave, the running processes, the machine.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cgroup::Cgroups;
use crate::machine::Machine;
use crate::metrics::Metrics;
use crate::process::table::Table;
use crate::users::{Accounts, User};

/// What `POST /init` sets.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Demanded as `X-Access-Token` when there is one.
    pub access_token: Option<String>,
    /// Environment of every process: what the sandbox was given, and its identity.
    pub variables: BTreeMap<String, String>,
    pub identity: BTreeMap<String, String>,
    pub default_user: Option<String>,
    pub default_workdir: Option<String>,
    pub lifecycle_id: String,
}

impl Settings {
    /// Environment of the sandbox; its identity cannot be overridden.
    pub fn environment(&self) -> BTreeMap<String, String> {
        let mut all = self.variables.clone();
        all.extend(self.identity.clone());
        all
    }
}

pub struct Agent {
    pub processes: Table,
    pub cgroups: Cgroups,
    /// Absent when the machine is not ours to change.
    pub machine: Option<Machine>,
    pub metrics: Metrics,
    settings: Mutex<Settings>,
}

impl Agent {
    /// Starts reaping children, too: call it within the runtime.
    pub fn new(cgroups: Cgroups, machine: Option<Machine>) -> io::Result<Arc<Self>> {
        let identity = BTreeMap::from([("E2B_SANDBOX".to_owned(), "true".to_owned())]);
        let settings = Mutex::new(Settings {
            identity,
            ..Settings::default()
        });
        let processes = Table::new()?;
        Ok(Arc::new(Self {
            processes,
            cgroups,
            machine,
            metrics: Metrics::default(),
            settings,
        }))
    }

    pub fn settings(&self) -> MutexGuard<'_, Settings> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds the named account, or the default one; its home is made when the image has no account `user`. Reads files: call it
    /// where blocking is allowed.
    ///
    /// Errors: the name nobody has.
    pub fn user(&self, name: Option<&str>) -> Result<User, String> {
        let default = self.settings().default_user.clone();
        let name = name
            .filter(|name| !name.is_empty())
            .map(str::to_owned)
            .or(default)
            .unwrap_or_else(|| "user".into());
        let user = Accounts::load().find(&name).ok_or(name)?;
        if user.name == "user" && !user.home.exists() {
            // Made on first use, so that an image that is only read stays as it is. Without it the user still works, at `/`.
            let _ = crate::filesystem::tree::make_directories(&user.home, &user);
        }
        Ok(user)
    }
}

/// Runs what may block off the agent's thread. A panic in it reaches only its caller, as an error.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(io::Error::other)
}
