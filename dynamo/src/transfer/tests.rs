use super::*;
use dynamo_runtime::discovery::{MockDiscovery, SharedMockRegistry};
use std::time::Instant;

const LONG: Duration = Duration::from_secs(30);

/// Two workers that find each other.
fn peers() -> [Peers; 2] {
    let registry = SharedMockRegistry::new();
    [1, 2].map(|id| Peers::new(Arc::new(MockDiscovery::new(Some(id), registry.clone())), "here".into()))
}

async fn shelf(room: usize, patience: Duration) -> Shelf {
    Shelf::open("127.0.0.1", room, patience).await.unwrap()
}

fn state(len: usize) -> State {
    State { tokens: 7, bytes: (0..len).map(|i| i as u8).collect() }
}

/// By the way of JSON, as the frontend carries it.
fn carried(ticket: &Ticket) -> Ticket {
    serde_json::from_value(serde_json::to_value(ticket).unwrap()).unwrap()
}

/// Waits until a shelf is empty: who fetches a state has it before the shelf has sent its end.
async fn emptied(shelf: &Shelf) {
    let start = Instant::now();
    while !shelf.is_empty() {
        assert!(start.elapsed() < LONG);
        sleep(Duration::from_millis(10)).await;
    }
}

fn cause(fetched: Result<State>) -> String {
    fetched.unwrap_err().root_cause().to_string()
}

#[tokio::test]
async fn a_state_is_fetched_once() {
    let ([first, second], shelf) = (peers(), shelf(1 << 22, LONG).await);
    first.register("prefill", &shelf).await.unwrap();
    let tickets = [shelf.put(state(1_000_000)).unwrap(), shelf.put(state(1_000_000)).unwrap()];
    assert!(!shelf.is_empty());
    let got = second.fetch(carried(&tickets[0]), 1 << 20).await.unwrap();
    assert_eq!((got.tokens, got.bytes == state(1_000_000).bytes), (7, true));
    assert!(second.fetch(carried(&tickets[0]), 1 << 20).await.is_err(), "once");
    assert!(cause(second.fetch(carried(&tickets[1]), 100).await).contains("at most 100"));
    emptied(&shelf).await;
}

/// More bytes than a connection holds: a worker that ended now would break it.
#[tokio::test]
async fn a_state_on_its_way_is_not_gone() {
    let shelf = shelf(1 << 27, LONG).await;
    let Ticket { address, number, .. } = shelf.put(state(1 << 26)).unwrap();
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(number.as_bytes()).await.unwrap();
    assert_eq!(stream.read_u64_le().await.unwrap(), 1 << 26);
    assert!(lock(&shelf.states).is_empty() && !shelf.is_empty());
    stream.read_to_end(&mut Vec::new()).await.unwrap();
    emptied(&shelf).await;
}

#[tokio::test]
async fn only_registered_addresses_are_connected_to() {
    let ([first, second], shelf) = (peers(), shelf(1 << 20, LONG).await);
    let ticket = shelf.put(state(10)).unwrap();
    assert!(cause(second.fetch(carried(&ticket), 100).await).contains("no worker has registered"));
    assert!(!shelf.is_empty(), "nobody came");
    first.register("prefill", &shelf).await.unwrap();
    let [elsewhere, _] = peers();
    assert!(elsewhere.fetch(carried(&ticket), 100).await.is_err(), "another discovery");
    assert_eq!(second.fetch(ticket, 100).await.unwrap().bytes, state(10).bytes);
}

/// Nobody puts or asks: states go by themselves, and make room.
#[tokio::test]
async fn a_shelf_is_bounded_by_bytes_and_by_time() {
    let shelf = shelf(1000, Duration::from_millis(100)).await;
    shelf.put(state(600)).unwrap();
    let message = shelf.put(state(401)).unwrap_err().to_string();
    assert!(message.contains("--transfer-memory") && message.contains("600 of 1000"), "{message}");
    shelf.put(state(400)).unwrap();
    emptied(&shelf).await;
    shelf.put(state(1000)).unwrap();
    assert!(shelf.put(state(1)).is_err());
}

/// A peer that promises more than it sends.
#[tokio::test]
async fn promised_bytes_take_no_memory() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.read_exact(&mut [0; 16]).await.unwrap();
        // More than any machine has: to allocate it would abort.
        stream.write_u64_le(1 << 60).await.unwrap();
        stream.write_all(&[1; 1000]).await.unwrap();
    });
    let ticket = Ticket { address, number: Uuid::new_v4(), tokens: 1 };
    assert!(cause(read(ticket, u64::MAX).await).contains("got 1000"));
}
