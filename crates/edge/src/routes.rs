//! The table of routes: which sandbox is where, under which generation, and who is connected to it.
//!
//! A [`Route`] lives from the message that made it until one that replaces or deletes it, and owns everything that must not outlive it: the
//! pool of upstream connections and the list of clients in the middle of an exchange. So an address used again can never get another
//! sandbox's request.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;
use tokio_util::sync::CancellationToken;

use crate::upstream::{Address, Pool, Upstream};

/// How many deleted sandboxes are remembered, so that a late message about one is known to be late.
const REMEMBERED: usize = 16_384;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Running,
    Paused,
}

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Token(String);

impl Token {
    /// Takes the same time for every wrong value of the right length.
    pub fn matches(&self, given: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(given).into()
    }
}

/// A route as its owner states it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteSpec {
    pub generation: u64,
    pub state: State,
    /// Where a running sandbox is reached.
    pub address: Option<IpAddr>,
    pub envd_port: u16,
    pub access_token: Option<Token>,
    pub traffic_token: Option<Token>,
}

impl RouteSpec {
    pub fn check(&self) -> Result<(), &'static str> {
        match (self.state, self.address) {
            (State::Running, None) => Err("a running sandbox has an address"),
            _ if self.envd_port == 0 => Err("envd_port is from 1 to 65535"),
            _ => Ok(()),
        }
    }
}

pub struct Route {
    pub spec: RouteSpec,
    pool: Arc<Pool>,
    ended: CancellationToken,
    /// None once the route has ended.
    clients: Mutex<Option<Clients>>,
}

#[derive(Default)]
struct Clients {
    next: u64,
    cuts: HashMap<u64, CancellationToken>,
}

impl Route {
    fn new(spec: RouteSpec) -> Arc<Self> {
        Arc::new(Self {
            spec,
            pool: Arc::default(),
            ended: CancellationToken::new(),
            clients: Mutex::new(Some(Clients::default())),
        })
    }

    /// Where to send requests for a port; None when the sandbox is not running.
    pub fn upstream(&self, port: u16) -> Option<Upstream> {
        let address = self
            .spec
            .address
            .filter(|_| self.spec.state == State::Running)?;
        Some(Upstream::new(
            Address::Tcp((address, port).into()),
            Arc::clone(&self.pool),
            self.ended.clone(),
        ))
    }

    /// Announces an exchange with a client: `cut` is cancelled if the route ends before the attachment is dropped. None: it has ended already.
    pub fn attach(self: &Arc<Self>, cut: CancellationToken) -> Option<Attachment> {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        let clients = clients.as_mut()?;
        clients.next += 1;
        clients.cuts.insert(clients.next, cut);
        Some(Attachment {
            route: Arc::clone(self),
            number: clients.next,
        })
    }

    pub fn has_ended(&self) -> bool {
        self.ended.is_cancelled()
    }

    /// Cuts the clients first: one that saw the upstream's end before could take it for the end of an answer.
    fn end(&self) {
        let clients = self
            .clients
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        for cut in clients
            .into_iter()
            .flat_map(|clients| clients.cuts.into_values())
        {
            cut.cancel();
        }
        self.ended.cancel();
    }
}

/// A client in the middle of an exchange with a route.
pub struct Attachment {
    route: Arc<Route>,
    number: u64,
}

impl Drop for Attachment {
    fn drop(&mut self) {
        let mut clients = self
            .route
            .clients
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(clients) = clients.as_mut() {
            clients.cuts.remove(&self.number);
        }
    }
}

/// A message about a generation older than the one held, which is this.
#[derive(Debug, PartialEq, Eq)]
pub struct Late(pub u64);

#[derive(Default)]
pub struct RouteTable(RwLock<Entries>);

#[derive(Default)]
struct Entries {
    routes: HashMap<String, Arc<Route>>,
    deleted: HashMap<String, u64>,
    deletions: VecDeque<String>,
}

impl RouteTable {
    pub fn get(&self, id: &str) -> Option<Arc<Route>> {
        self.read(|entries| entries.routes.get(id).cloned())
    }

    /// Publishes a route. An equal one changes nothing; any other ends the route held, and all that goes through it.
    pub fn put(&self, id: &str, spec: RouteSpec) -> Result<(), Late> {
        let old = self.write(|entries| {
            let held = entries.routes.get(id);
            if held.is_some_and(|route| route.spec == spec) {
                return Ok(None);
            }
            let known = held
                .map(|route| route.spec.generation)
                .or_else(|| entries.deleted.get(id).copied());
            match known {
                Some(generation) if generation > spec.generation => Err(Late(generation)),
                _ => Ok(entries.routes.insert(id.to_owned(), Route::new(spec))),
            }
        })?;
        old.iter().for_each(|route| route.end());
        Ok(())
    }

    /// Deletes a route and cuts its clients. An unknown one is fine.
    pub fn delete(&self, id: &str, generation: u64) -> Result<(), Late> {
        let old = self.write(|entries| match entries.routes.get(id) {
            Some(route) if route.spec.generation > generation => Err(Late(route.spec.generation)),
            _ => {
                entries.remember(id, generation);
                Ok(entries.routes.remove(id))
            }
        })?;
        old.iter().for_each(|route| route.end());
        Ok(())
    }

    /// Replaces the whole table, whatever the generations: its owner starts afresh. Equal routes keep their connections.
    pub fn replace(&self, specs: BTreeMap<String, RouteSpec>) {
        let old = self.write(|entries| {
            let mut old = std::mem::take(entries).routes;
            for (id, spec) in specs {
                let equal = old.get(&id).is_some_and(|route| route.spec == spec);
                let kept = if equal { old.remove(&id) } else { None };
                entries
                    .routes
                    .insert(id, kept.unwrap_or_else(|| Route::new(spec)));
            }
            old
        });
        old.values().for_each(|route| route.end());
    }

    pub fn specs(&self) -> BTreeMap<String, RouteSpec> {
        self.read(|entries| {
            entries
                .routes
                .iter()
                .map(|(id, route)| (id.clone(), route.spec.clone()))
                .collect()
        })
    }

    pub fn len(&self) -> usize {
        self.read(|entries| entries.routes.len())
    }

    /// Closes upstream connections that nobody used for long.
    pub fn sweep(&self) {
        self.read(|entries| entries.routes.values().for_each(|route| route.pool.sweep()));
    }

    fn read<T>(&self, look: impl FnOnce(&Entries) -> T) -> T {
        look(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write<T>(&self, change: impl FnOnce(&mut Entries) -> T) -> T {
        change(&mut self.0.write().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Entries {
    fn remember(&mut self, id: &str, generation: u64) {
        let known = self.deleted.insert(id.to_owned(), generation);
        match known {
            Some(known) => drop(self.deleted.insert(id.to_owned(), known.max(generation))),
            None => self.deletions.push_back(id.to_owned()),
        }
        if self.deletions.len() > REMEMBERED
            && let Some(oldest) = self.deletions.pop_front()
        {
            self.deleted.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(generation: u64, address: &str) -> RouteSpec {
        RouteSpec {
            generation,
            state: State::Running,
            address: Some(address.parse().unwrap()),
            envd_port: 49983,
            access_token: None,
            traffic_token: None,
        }
    }

    #[test]
    fn late_messages_are_refused() {
        let table = RouteTable::default();
        table.put("i1", spec(5, "10.0.0.1")).unwrap();
        assert_eq!(table.put("i1", spec(4, "10.0.0.2")), Err(Late(5)));
        assert_eq!(table.delete("i1", 4), Err(Late(5)));
        table.put("i1", spec(5, "10.0.0.3")).unwrap();
        table.delete("i1", 6).unwrap();
        assert_eq!(
            table.put("i1", spec(5, "10.0.0.1")),
            Err(Late(6)),
            "also after a deletion"
        );
        table.put("i1", spec(6, "10.0.0.1")).unwrap();
        assert_eq!(table.delete("unknown", 1), Ok(()));
    }

    #[test]
    fn a_route_that_ends_cuts_its_clients_once_and_only_its_own() {
        let table = RouteTable::default();
        table.put("i1", spec(1, "10.0.0.1")).unwrap();
        table.put("i2", spec(1, "10.0.0.2")).unwrap();
        let (first, second) = (table.get("i1").unwrap(), table.get("i2").unwrap());
        let cuts: Vec<_> = (0..3).map(|_| CancellationToken::new()).collect();
        let done = first.attach(cuts[0].clone()).unwrap();
        let _open = first.attach(cuts[1].clone()).unwrap();
        let _other = second.attach(cuts[2].clone()).unwrap();
        drop(done);
        table.put("i1", spec(1, "10.0.0.1")).unwrap();
        assert!(!cuts[1].is_cancelled(), "an equal route changes nothing");
        table.put("i1", spec(2, "10.0.0.1")).unwrap();
        assert_eq!(
            cuts.iter()
                .map(CancellationToken::is_cancelled)
                .collect::<Vec<_>>(),
            [false, true, false]
        );
        assert!(first.has_ended() && first.attach(CancellationToken::new()).is_none());
        table.delete("i2", 1).unwrap();
        assert!(cuts[2].is_cancelled());
    }

    #[test]
    fn replacing_keeps_equal_routes() {
        let table = RouteTable::default();
        for id in ["same", "changed", "gone"] {
            table.put(id, spec(7, "10.0.0.1")).unwrap();
        }
        table.delete("deleted", 9).unwrap();
        let old: Vec<_> = ["same", "changed", "gone"]
            .map(|id| table.get(id).unwrap())
            .into();
        let wanted = [("same", 7), ("changed", 3), ("new", 1), ("deleted", 1)];
        table.replace(
            wanted
                .map(|(id, generation)| (id.into(), spec(generation, "10.0.0.1")))
                .into(),
        );
        assert_eq!(
            old.iter()
                .map(|route| route.has_ended())
                .collect::<Vec<_>>(),
            [false, true, true]
        );
        assert!(Arc::ptr_eq(&old[0], &table.get("same").unwrap()));
        assert_eq!(table.get("changed").unwrap().spec.generation, 3);
        assert_eq!(table.specs().len(), 4);
    }

    #[test]
    fn memory_of_deletions_is_bounded() {
        let table = RouteTable::default();
        (0..REMEMBERED + 10).for_each(|number| table.delete(&number.to_string(), 1).unwrap());
        assert_eq!(
            table.read(|entries| (entries.deleted.len(), entries.deletions.len())),
            (REMEMBERED, REMEMBERED)
        );
    }
}
