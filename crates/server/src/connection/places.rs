//! Places for connections, and who gives way when they are taken.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::task::AbortHandle;

use super::waiting::Connection;
use crate::ServerError;

/// Maximum number of connections that are open at the same time.
const MAX_CONNECTIONS: usize = 1024;

/// Maximum number of extra places.
const MAX_EXTRA: usize = 64;

/// Minimum number of connections that a server needs.
const MIN_CONNECTIONS: usize = 32;

/// Time for a client to send its request before it may have to give way, so that new connections do not push each other out.
const PATIENCE: Duration = Duration::from_millis(500);

/// File descriptors kept for everything else: other files of a server, and connections that are being closed.
const OTHER_FILES: usize = 192;

/// How many connections may be open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Places {
    /// Connections that are served.
    all: usize,
    /// Extra connections, which may ask only for the server's health.
    extra: usize,
    /// Time for which the client of a served connection may keep the server waiting before it may have to give way.
    patience: Duration,
}

/// Requests that are answered on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// All requests.
    Regular,
    /// Only requests for the server's health.
    Extra,
}

impl Places {
    /// Creates as many places as the system's limit of open files permits; the limit is raised if possible.
    ///
    /// # Errors
    ///
    /// Fails if too few files may be open.
    pub(crate) fn of_system() -> Result<Self, ServerError> {
        Self::within(raise_file_limit(MAX_CONNECTIONS + MAX_EXTRA + OTHER_FILES))
    }

    /// The places of a process that may open `limit` files.
    fn within(limit: usize) -> Result<Self, ServerError> {
        let all = limit.saturating_sub(OTHER_FILES + MAX_EXTRA);
        if all >= MIN_CONNECTIONS {
            Ok(Self {
                all: all.min(MAX_CONNECTIONS),
                extra: MAX_EXTRA,
                patience: PATIENCE,
            })
        } else {
            Err(ServerError::Files {
                limit,
                needed: OTHER_FILES + MAX_EXTRA + MIN_CONNECTIONS,
            })
        }
    }

    /// Maximum number of places of one address.
    fn of_address(self) -> usize {
        self.all / 2
    }
}

/// Files that this process may open, after an attempt to make them `wanted`.
fn raise_file_limit(wanted: usize) -> usize {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let limit = getrlimit(Resource::Nofile);
        let is_enough = |limit: Option<u64>| limit.is_none_or(|limit| limit >= wanted as u64);
        if !is_enough(limit.current) {
            let most = limit.maximum.unwrap_or(u64::MAX);
            let raised = Rlimit {
                current: Some(most.min(wanted as u64)),
                maximum: limit.maximum,
            };
            let _ = setrlimit(Resource::Nofile, raised);
        }
        let now = getrlimit(Resource::Nofile).current;
        now.map_or(wanted, |limit| usize::try_from(limit).unwrap_or(wanted))
    }
    #[cfg(not(unix))]
    wanted
}

/// The open connections.
pub(crate) struct Table {
    places: Places,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    next: u64,
    entries: BTreeMap<u64, Entry>,
}

struct Entry {
    address: IpAddr,
    place: Place,
    connection: Arc<Connection>,
    /// Closes the connection.
    task: Option<AbortHandle>,
}

impl Table {
    /// A table with `places`.
    pub(crate) fn new(places: Places) -> Self {
        Self {
            places,
            open: Mutex::default(),
        }
    }

    /// Adds a new connection; another one may have to give way.
    pub(crate) fn admit(&self, client: IpAddr) -> (Arc<Connection>, Place) {
        let address = network(client);
        let patience = self.places.patience;
        let mut open = self.lock();
        let is_regular = |entry: &Entry| entry.place == Place::Regular;
        let is_own = |entry: &Entry| is_regular(entry) && entry.address == address;
        let has_place = if open.count(is_own) >= self.places.of_address() {
            open.close_longest_waiting(patience, is_own)
        } else if open.count(is_regular) >= self.places.all {
            open.close_longest_waiting(patience, is_regular)
        } else {
            true
        };
        let place = if has_place {
            Place::Regular
        } else {
            Place::Extra
        };
        let is_extra = |entry: &Entry| entry.place == Place::Extra;
        if place == Place::Extra && open.count(is_extra) >= self.places.extra {
            open.close_longest_waiting(Duration::ZERO, is_extra);
        }
        let id = open.next;
        open.next += 1;
        let connection = Arc::new(Connection::new(id));
        let entry = Entry {
            address,
            place,
            connection: Arc::clone(&connection),
            task: None,
        };
        open.entries.insert(id, entry);
        (connection, place)
    }

    /// Records the task of connection `id`.
    pub(crate) fn started(&self, id: u64, task: AbortHandle) {
        if let Some(entry) = self.lock().entries.get_mut(&id) {
            entry.task = Some(task);
        }
    }

    /// Removes connection `id` when the result is dropped.
    pub(crate) fn leave_on_drop(self: &Arc<Self>, id: u64) -> impl Drop + use<> {
        struct Leave(Arc<Table>, u64);
        impl Drop for Leave {
            fn drop(&mut self) {
                self.0.lock().entries.remove(&self.1);
            }
        }
        Leave(Arc::clone(self), id)
    }

    /// Closes the connection whose client has kept the server waiting longest.
    pub(crate) fn close_longest_waiting(&self) {
        self.lock().close_longest_waiting(Duration::ZERO, |_| true);
    }

    /// Closes the connections whose clients have kept the server waiting for `patience`.
    pub(crate) fn close_waiting(&self, patience: Duration) {
        self.lock().close_all(|entry| {
            let since = entry.connection.waits_since();
            since.is_some_and(|since| since.elapsed() >= patience)
        });
    }

    /// Closes all connections.
    pub(crate) fn close_all(&self) {
        self.lock().close_all(|_| true);
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Open {
    fn count(&self, is_counted: impl Fn(&Entry) -> bool) -> usize {
        self.entries
            .values()
            .filter(|entry| is_counted(entry))
            .count()
    }

    /// Closes the eligible connection for which the server has waited longest, if at least `patience`; returns whether there was
    /// one.
    fn close_longest_waiting(
        &mut self,
        patience: Duration,
        is_eligible: impl Fn(&Entry) -> bool,
    ) -> bool {
        let eligible = self.entries.iter().filter(|(_, entry)| is_eligible(entry));
        let waiting =
            eligible.filter_map(|(id, entry)| Some((entry.connection.waits_since()?, *id)));
        let longest = waiting.min();
        let longest = longest.filter(|(since, _)| since.elapsed() >= patience);
        if let Some((_, id)) = longest {
            self.close(id);
        }
        longest.is_some()
    }

    fn close_all(&mut self, is_closed: impl Fn(&Entry) -> bool) {
        let closed = self.entries.iter().filter(|(_, entry)| is_closed(entry));
        let closed: Vec<u64> = closed.map(|(id, _)| *id).collect();
        closed.into_iter().for_each(|id| self.close(id));
    }

    fn close(&mut self, id: u64) {
        if let Some(task) = self.entries.remove(&id).and_then(|entry| entry.task) {
            task.abort();
        }
    }
}

/// Identifies one client: its address or, for IPv6, the /64 network from which a host chooses its addresses.
fn network(client: IpAddr) -> IpAddr {
    match client.to_canonical() {
        IpAddr::V6(address) if !address.is_loopback() => {
            let network = u128::from(address) & !u128::from(u64::MAX);
            IpAddr::V6(network.into())
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACES: Places = Places {
        all: 4,
        extra: 2,
        patience: Duration::ZERO,
    };

    fn ids(table: &Table) -> Vec<u64> {
        table.lock().entries.keys().copied().collect()
    }

    fn address(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    #[test]
    fn the_longest_waiting_connection_gives_way() {
        let table = Table::new(PLACES);
        let open: Vec<_> = (0..4)
            .map(|client| table.admit(address(client)).0)
            .collect();
        open[0].begins(false);
        open[1].begins(true);
        assert_eq!(table.admit(address(9)).1, Place::Regular);
        assert_eq!(
            ids(&table),
            [0, 1, 3, 4],
            "idle since before the body of 1 was expected"
        );
        open[0].reads(false);
        table.close_waiting(Duration::from_secs(60));
        assert_eq!(ids(&table).len(), 4);
        table.close_waiting(Duration::ZERO);
        assert_eq!(
            ids(&table),
            [0_u64; 0],
            "a client that does not read keeps the server waiting"
        );
    }

    #[test]
    fn an_address_pushes_out_its_own_connections_first() {
        let table = Table::new(PLACES);
        table.admit(address(1));
        for _ in 0..10 {
            assert_eq!(table.admit(address(2)).1, Place::Regular);
        }
        assert_eq!(ids(&table), [0, 9, 10]);
        let v6 = |host: u16| IpAddr::from([0x2001, 0xdb8, 0, 1, 0, 0, 0, host]);
        assert_eq!(network(v6(1)), network(v6(2)));
        assert_eq!(network("::ffff:10.0.0.1".parse().unwrap()), address(1));
    }

    #[test]
    fn connections_that_are_answered_stay_and_others_get_extra_places() {
        let table = Table::new(PLACES);
        for client in 0..4 {
            table.admit(address(client)).0.begins(false);
        }
        for client in 4..20 {
            assert_eq!(table.admit(address(client)).1, Place::Extra);
        }
        assert_eq!(ids(&table), [0, 1, 2, 3, 18, 19]);
    }

    #[test]
    fn clients_have_time_to_send_their_requests() {
        let table = Table::new(Places {
            patience: Duration::from_secs(60),
            ..PLACES
        });
        for client in 0..4 {
            assert_eq!(table.admit(address(client)).1, Place::Regular);
        }
        assert_eq!(table.admit(address(4)).1, Place::Extra);
        assert_eq!(ids(&table), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn places_fit_the_limit_of_open_files() {
        assert_eq!(Places::within(100_000).unwrap().all, 1024);
        assert_eq!(Places::within(512).unwrap().all, 256);
        let error = Places::within(64).unwrap_err().to_string();
        assert!(
            error.contains("64 files") && error.contains("ulimit -n"),
            "{error}"
        );
    }
}
