//! Heat spreads over a plate of which each process has some rows. After each step neighbours put their outermost rows, the halo, into each
//! other's memory; a notification says which step's they are.
//!
//! ```text
//! halo_exchange listen 0.0.0.0:7070 PROCESSES            takes part, and prints the command for the others
//! halo_exchange connect HOST:7070 KEY [OWN_ADDRESS]      OWN_ADDRESS: where this one's neighbours find it
//! ```

use std::num::NonZeroU32;
use std::time::Duration;

use netvm::node::{Node, RemoteKey, Rights};
use netvm::notify::{Notifications, Notify};
use netvm::region::Region;
use netvm::security::{Secret, Security};
use netvm::sync::{Combine, Group, Kind};

type Result<T = (), E = Box<dyn std::error::Error>> = std::result::Result<T, E>;
type Row = [f64; COLUMNS];

const COLUMNS: usize = 64;
/// Rows of each process.
const ROWS: usize = 16;
const STEPS: usize = 200;
const TIMEOUT: Option<Duration> = Some(Duration::from_secs(60));
/// Notification numbers, and places of rows: from above and from below, for even steps; two more for odd ones, so that a neighbour that is a
/// step ahead overwrites nothing.
const ABOVE: usize = 0;
const BELOW: usize = 1;

fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let node = start()?;
    let (own, group) = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["listen", address, processes] => {
            let key = node.export_sync("group", Kind::Group { parties: processes.parse()? })?;
            // Before anybody else can: ours is the first rank.
            let group = Group::join(&node.connect_local(&node)?, "group", &key)?;
            let address = node.listen(address)?;
            println!("halo_exchange connect {address} {}", key.to_text());
            (address, group)
        }
        ["connect", address, key, ref own @ ..] => {
            let key = RemoteKey::from_text(key).ok_or("not a key")?;
            let own = node.listen(own.first().unwrap_or(&"127.0.0.1:0"))?;
            (own, Group::join(&node.connect(address)?, "group", &key)?)
        }
        _ => {
            return Err(
                "usage: halo_exchange listen ADDRESS PROCESSES | connect ADDRESS KEY [OWN_ADDRESS]".into()
            );
        }
    };
    run(&node, &own, group)
}

fn run(node: &Node, own: &str, mut group: Group) -> Result {
    let memory = Node::memory(4096)?;
    let (key, board) = node.export_notified("halo", memory.clone(), Rights::ReadWrite, 4)?;
    let (rank, parties) = (group.rank() as usize, group.parties() as usize);
    // Everybody learns where everybody is.
    let card = format!("{own} {}", key.to_text());
    let mut cards = Vec::new();
    for root in 0..group.parties() {
        cards.push(String::from_utf8(group.broadcast(root, card.as_bytes(), TIMEOUT)?)?);
    }
    let neighbour = |rank: Option<usize>| -> Result<Option<Region>> {
        let Some(card) = rank.and_then(|rank| cards.get(rank)) else { return Ok(None) };
        let (address, key) = card.split_once(' ').ok_or("not a card")?;
        let key = RemoteKey::from_text(key).ok_or("not a key")?;
        Ok(Some(node.connect(address)?.import("halo", &key)?))
    };
    let (above, below) = (neighbour(rank.checked_sub(1))?, neighbour(Some(rank + 1))?);

    let mut plate: Vec<Row> = plate(rank * ROWS, ROWS);
    let mut change = 0.0;
    for step in 0..STEPS {
        // Our first row is below the neighbour above, and our last one above the neighbour below.
        put(above.as_ref(), BELOW, step, &plate[1])?;
        put(below.as_ref(), ABOVE, step, &plate[ROWS])?;
        for (from, side, row) in [(&above, ABOVE, 0), (&below, BELOW, ROWS + 1)] {
            if from.is_some() {
                receive(&board, side, step)?;
                let mut bytes = [[0; 8]; COLUMNS];
                memory.shared().read_into(place(side, step), bytes.as_flattened_mut()).ok_or("no row")?;
                plate[row] = bytes.map(f64::from_le_bytes);
            }
        }
        change = spread(&mut plate);
    }
    let change = group.reduce_f64(Combine::MaxF64, change, TIMEOUT)?;
    let mut whole = self::plate(0, parties * ROWS);
    for _ in 0..STEPS {
        spread(&mut whole);
    }
    assert_eq!(plate[1..=ROWS], whole[rank * ROWS + 1..][..ROWS], "not what one process alone computes");
    println!("process {rank} of {parties}: as the serial result; last change {change:.6}");
    // Nobody goes while others need its memory.
    Ok(group.barrier(TIMEOUT)?)
}

/// Rows from `first` on, with one more above and below.
fn plate(first: usize, rows: usize) -> Vec<Row> {
    let heat = |row: usize, column| f64::from(u8::from(row % 11 == 3 && column % 7 == 2)) * 100.0;
    let row = |row: usize| std::array::from_fn(|column| heat(first + row, column));
    std::iter::once([0.0; COLUMNS]).chain((0..rows).map(row)).chain([[0.0; COLUMNS]]).collect()
}

/// One step; the plate's sides stay as they are. Returns the greatest change.
fn spread(plate: &mut [Row]) -> f64 {
    let (old, mut most) = (plate.to_vec(), 0f64);
    for row in 1..plate.len() - 1 {
        for c in 1..COLUMNS - 1 {
            let around = old[row - 1][c] + old[row + 1][c] + old[row][c - 1] + old[row][c + 1];
            plate[row][c] += 0.2 * (around - 4.0 * old[row][c]);
            most = most.max((plate[row][c] - old[row][c]).abs());
        }
    }
    most
}

fn number(side: usize, step: usize) -> usize {
    side + 2 * (step % 2)
}

fn place(side: usize, step: usize) -> usize {
    number(side, step) * size_of::<Row>()
}

fn put(neighbour: Option<&Region>, side: usize, step: usize, row: &Row) -> Result {
    let Some(neighbour) = neighbour else { return Ok(()) };
    let value = NonZeroU32::MIN.saturating_add(step as u32);
    let notify = Notify::Post { number: number(side, step) as u16, value };
    Ok(neighbour.write_notify(place(side, step) as u64, row.map(f64::to_le_bytes).as_flattened(), notify)?)
}

fn receive(board: &Notifications, side: usize, step: usize) -> Result {
    let number = number(side, step) as u16;
    let came = board.wait(number, TIMEOUT).then(|| board.reset(number)).flatten();
    if came.is_some_and(|value| value.get() == step as u32 + 1) { Ok(()) } else { Err("no halo came".into()) }
}

/// Machines on a network share a secret: `netvm secret new FILE`, and `NETVM_SECRET_FILE=FILE` for all.
fn start() -> Result<Node> {
    let file = std::env::var_os("NETVM_SECRET_FILE");
    let secret = file.map(|file| Secret::from_file(file.as_ref())).transpose()?;
    Ok(Node::with_security(Security { secret, ..Security::default() })?)
}
