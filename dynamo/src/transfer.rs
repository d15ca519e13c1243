//! States on their way from a worker that feeds prompts to one that completes them, through the memory of both hosts.
//!
//! The first one keeps the bytes on a shelf and answers with a ticket, which the frontend hands to the second one; that
//! fetches the bytes over TCP: it sends the ticket's number, 16 bytes, and gets the length, 8 bytes, and the bytes.

use ::safetensors::serialize;
use anyhow::{bail, ensure, Context, Result};
use candle_core::{safetensors, Device};
use candle_gdn_models::{CausalLm, SequenceSnapshot};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use uuid::Uuid;

/// After so long nobody comes for a state any more, or no longer waits for one.
const PATIENCE: Duration = Duration::from_secs(30);

/// The state after the first tokens of a prompt.
#[derive(Debug)]
pub struct State {
    /// So many.
    pub tokens: usize,
    pub bytes: Vec<u8>,
}

impl State {
    /// A copy; on the thread of the engine.
    ///
    /// # Errors
    /// When the device refuses.
    pub fn of(snapshot: &SequenceSnapshot) -> Result<Self> {
        Ok(Self { tokens: snapshot.len(), bytes: serialize(&snapshot.to_host()?, None)? })
    }

    /// What a sequence of `model` goes on from; on the thread of the engine.
    ///
    /// # Errors
    /// When it is of another model, or the device refuses.
    pub fn snapshot(&self, model: &CausalLm) -> Result<SequenceSnapshot> {
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

/// By number: since when it waits, and the bytes.
type States = HashMap<Uuid, (Instant, Vec<u8>)>;

/// States that wait to be fetched.
pub struct Shelf {
    address: String,
    states: Arc<Mutex<States>>,
}

impl Shelf {
    /// Other workers reach it at `host`, on a port that the system chooses.
    ///
    /// # Errors
    /// When there is no such address here.
    pub async fn open(host: &str) -> Result<Self> {
        let listener = TcpListener::bind((host, 0)).await.with_context(|| format!("--transfer-host {host}"))?;
        let address = format!("{host}:{}", listener.local_addr()?.port());
        let states = Arc::new(Mutex::new(States::new()));
        let shelf = Self { address, states: states.clone() };
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
                    if let Ok(Err(e)) | Err(e) = timeout(PATIENCE, give(stream, &states)).await.map_err(Into::into) {
                        tracing::warn!("a state was not fetched: {e:#}");
                    }
                });
            }
        });
        Ok(shelf)
    }

    /// Keeps a state until it is fetched, or nobody comes for it.
    pub fn put(&self, State { tokens, bytes }: State) -> Ticket {
        let number = Uuid::new_v4();
        let mut states = lock(&self.states);
        states.retain(|_, (since, _)| since.elapsed() < PATIENCE);
        states.insert(number, (Instant::now(), bytes));
        Ticket { address: self.address.clone(), number, tokens }
    }

    /// Whether nobody is to come any more.
    pub fn is_empty(&self) -> bool {
        let mut states = lock(&self.states);
        states.retain(|_, (since, _)| since.elapsed() < PATIENCE);
        states.is_empty()
    }
}

fn lock(states: &Mutex<States>) -> MutexGuard<'_, States> {
    states.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn give(mut stream: TcpStream, states: &Mutex<States>) -> Result<()> {
    let mut number = [0; 16];
    stream.read_exact(&mut number).await?;
    let state = lock(states).remove(&Uuid::from_bytes(number));
    let Some((_, bytes)) = state else { bail!("no state has this number") };
    stream.write_u64_le(bytes.len() as u64).await?;
    stream.write_all(&bytes).await?;
    Ok(stream.shutdown().await?)
}

/// The state of a ticket, of at most `most` bytes.
///
/// # Errors
/// When it cannot be had any more.
pub async fn fetch(Ticket { address, number, tokens }: Ticket, most: u64) -> Result<State> {
    let fetched = async {
        let mut stream = TcpStream::connect(&address).await?;
        stream.write_all(number.as_bytes()).await?;
        let len = stream.read_u64_le().await?;
        ensure!(len <= most, "expected at most {most} bytes, got {len}");
        let mut bytes = vec![0; len as usize];
        stream.read_exact(&mut bytes).await?;
        Ok(State { tokens, bytes })
    };
    timeout(PATIENCE, fetched)
        .await
        .unwrap_or_else(|e| Err(e.into()))
        .with_context(|| format!("the state at {address}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_state_is_fetched_once() {
        let shelf = Shelf::open("127.0.0.1").await.unwrap();
        let bytes: Vec<u8> = (0..1_000_000u32).map(|i| i as u8).collect();
        let ticket = |bytes: &Vec<u8>| {
            let ticket = shelf.put(State { tokens: 7, bytes: bytes.clone() });
            // By the way of JSON, as the frontend carries it.
            serde_json::to_value(ticket).unwrap()
        };
        let [first, large] = [ticket(&bytes), ticket(&bytes)];
        let of = |value: &serde_json::Value| serde_json::from_value(value.clone()).unwrap();
        assert!(!shelf.is_empty());
        let state = fetch(of(&first), 1 << 20).await.unwrap();
        assert_eq!((state.tokens, state.bytes == bytes), (7, true));
        assert!(fetch(of(&first), 1 << 20).await.is_err(), "once");
        assert!(fetch(of(&large), 100).await.unwrap_err().root_cause().to_string().contains("at most 100"));
        assert!(shelf.is_empty());
    }
}
