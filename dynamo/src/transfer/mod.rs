//! States on their way from a worker that feeds prompts to one that completes them, through the memory of both hosts.
//!
//! The first one keeps the bytes on a shelf and answers with a ticket, which the frontend hands to the second one; that
//! fetches the bytes over TCP: it sends the ticket's number, 16 bytes, and gets the length, 8 bytes, and the bytes.
//! Discovery says where shelves are: no other address is connected to.

use crate::fingerprint::Fingerprint;
use ::safetensors::{serialize, SafeTensors};
use anyhow::{bail, ensure, Context, Result};
use candle_core::{safetensors, Device};
use candle_gdn_models::{CausalLm, SequenceSnapshot};
use dynamo_runtime::component::TransportType;
use dynamo_runtime::discovery::{Discovery, DiscoveryInstance, DiscoveryQuery, DiscoverySpec};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};
use uuid::Uuid;

/// After so long nobody comes for a state any more, or no longer waits for one.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// The name under which shelves are registered.
const ENDPOINT: &str = "transfer";

/// The state after the first tokens of a prompt.
#[derive(Debug)]
pub struct State {
    /// So many.
    pub tokens: usize,
    pub bytes: Vec<u8>,
}

impl State {
    /// A copy, with the fingerprint of what it is the state of; on the thread of the engine.
    ///
    /// # Errors
    /// When the device refuses.
    pub fn of(snapshot: &SequenceSnapshot, fingerprint: &Fingerprint) -> Result<Self> {
        let bytes = serialize(&snapshot.to_host()?, Some(fingerprint.entries().collect()))?;
        Ok(Self { tokens: snapshot.len(), bytes })
    }

    /// What a sequence of `model` goes on from, on the host; on the thread of the engine.
    ///
    /// # Errors
    /// When its fingerprint is another one, or the device refuses.
    pub fn snapshot(&self, model: &CausalLm, fingerprint: &Fingerprint) -> Result<SequenceSnapshot> {
        let (_, header) = SafeTensors::read_metadata(&self.bytes)?;
        fingerprint.check(header.metadata().as_ref())?;
        let tensors = safetensors::load_buffer(&self.bytes, &Device::Cpu)?;
        Ok(model.snapshot_from_host(self.tokens, &tensors)?)
    }
}

/// Where a state is to be had, once.
#[derive(Debug, Serialize, Deserialize)]
pub struct Ticket {
    address: String,
    number: Uuid,
    tokens: usize,
}

/// Bytes that count against a shelf's room until they are dropped, so that those under way count too.
struct Kept {
    bytes: Vec<u8>,
    held: Arc<AtomicUsize>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.held.fetch_sub(self.bytes.len(), Ordering::SeqCst);
    }
}

type States = HashMap<Uuid, Kept>;

/// States that wait to be fetched.
pub struct Shelf {
    address: String,
    states: Arc<Mutex<States>>,
    held: Arc<AtomicUsize>,
    room: usize,
    patience: Duration,
}

impl Shelf {
    /// Other workers reach it at `host`, on a port that the system chooses. It keeps at most `room` bytes, each state for
    /// `patience`.
    ///
    /// # Errors
    /// When there is no such address here.
    pub async fn open(host: &str, room: usize, patience: Duration) -> Result<Self> {
        let listener = TcpListener::bind((host, 0)).await.with_context(|| format!("--transfer-host {host}"))?;
        let address = format!("{host}:{}", listener.local_addr()?.port());
        let states = Arc::new(Mutex::new(States::new()));
        let shelf = Self { address, states: states.clone(), held: Arc::default(), room, patience };
        tokio::spawn(async move {
            loop {
                let stream = match listener.accept().await {
                    Ok((stream, _)) => stream,
                    // As where the process has too many files open: others will come when some are closed.
                    Err(e) => {
                        tracing::warn!("a connection for a state was not accepted: {e}");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                        continue;
                    }
                };
                let states = states.clone();
                tokio::spawn(async move {
                    if let Ok(Err(e)) | Err(e) = timeout(patience, give(stream, &states)).await.map_err(Into::into) {
                        tracing::warn!("a state was not fetched: {e:#}");
                    }
                });
            }
        });
        Ok(shelf)
    }

    /// Keeps a state until it is fetched or its time is over. On a thread of the runtime.
    ///
    /// # Errors
    /// When the states that wait leave no room.
    pub fn put(&self, State { tokens, bytes }: State) -> Result<Ticket> {
        let len = bytes.len();
        let fits = |held: usize| held.checked_add(len).filter(|sum| *sum <= self.room);
        if let Err(held) = self.held.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fits) {
            bail!(
                "--transfer-memory: states that nobody has fetched yet take {held} of {} bytes, this one {len}",
                self.room
            )
        }
        let (number, states, patience) = (Uuid::new_v4(), self.states.clone(), self.patience);
        lock(&states).insert(number, Kept { bytes, held: self.held.clone() });
        tokio::spawn(async move {
            sleep(patience).await;
            let expired = lock(&states).remove(&number);
            if let Some(Kept { bytes, .. }) = &expired {
                tracing::warn!("nobody fetched a state of {} bytes", bytes.len());
            }
        });
        Ok(Ticket { address: self.address.clone(), number, tokens })
    }

    /// Whether nobody is to come any more, and no state is on its way.
    pub fn is_empty(&self) -> bool {
        self.held.load(Ordering::SeqCst) == 0
    }
}

fn lock(states: &Mutex<States>) -> MutexGuard<'_, States> {
    states.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn give(mut stream: TcpStream, states: &Mutex<States>) -> Result<()> {
    let mut number = [0; 16];
    stream.read_exact(&mut number).await?;
    let state = lock(states).remove(&Uuid::from_bytes(number));
    let Some(Kept { bytes, .. }) = &state else { bail!("no state has this number") };
    stream.write_u64_le(bytes.len() as u64).await?;
    stream.write_all(bytes).await?;
    Ok(stream.shutdown().await?)
}

/// The workers of a namespace, as discovery knows them.
pub struct Peers {
    discovery: Arc<dyn Discovery>,
    namespace: String,
}

impl Peers {
    pub fn new(discovery: Arc<dyn Discovery>, namespace: String) -> Self {
        Self { discovery, namespace }
    }

    /// Makes a shelf known to the others, as that of a worker of `component`, until this process ends.
    ///
    /// # Errors
    /// When discovery refuses.
    pub async fn register(&self, component: &str, shelf: &Shelf) -> Result<()> {
        let spec = DiscoverySpec::Endpoint {
            namespace: self.namespace.clone(),
            component: component.into(),
            endpoint: ENDPOINT.into(),
            transport: TransportType::Tcp(shelf.address.clone()),
            device_type: None,
            request_plane_codec: None,
        };
        self.discovery.register(spec).await.map(drop)
    }

    /// The state of a ticket, of at most `most` bytes.
    ///
    /// # Errors
    /// When no worker has registered the ticket's address, or the state cannot be had any more.
    pub async fn fetch(&self, ticket: Ticket, most: u64) -> Result<State> {
        let address = ticket.address.clone();
        let fetched = async {
            let query = DiscoveryQuery::NamespacedEndpoints { namespace: self.namespace.clone() };
            let is_shelf = |found: &DiscoveryInstance| match found {
                DiscoveryInstance::Endpoint(at) => at.endpoint == ENDPOINT && at.transport.address() == address,
                _ => false,
            };
            ensure!(self.discovery.list(query).await?.iter().any(is_shelf), "no worker has registered this address");
            read(ticket, most).await
        };
        let fetched = timeout(PATIENCE, fetched).await;
        fetched.unwrap_or_else(|e| Err(e.into())).with_context(|| format!("the state at {address}"))
    }
}

async fn read(Ticket { address, number, tokens }: Ticket, most: u64) -> Result<State> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(number.as_bytes()).await?;
    let len = stream.read_u64_le().await?;
    ensure!(len <= most, "expected at most {most} bytes, got {len}");
    // The memory grows with what has come, not with what is promised.
    let mut bytes = Vec::new();
    stream.take(len).read_to_end(&mut bytes).await?;
    ensure!(bytes.len() as u64 == len, "expected {len} bytes, got {}", bytes.len());
    Ok(State { tokens, bytes })
}

#[cfg(test)]
mod tests;
