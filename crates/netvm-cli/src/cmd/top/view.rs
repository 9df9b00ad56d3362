//! The live view.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use netvm_core::observe::Times;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{
    Bar, BarChart, BarGroup, Block, Borders, Paragraph, Row, Sparkline, Table, TableState,
};

use super::{find, held, pages, rate, reads};
use crate::runs::{Look, Rates, Run, lender_rates};
use crate::size::Size;

/// Looks that are kept for the curves.
const HISTORY: usize = 300;

const FETCHED: Color = Color::Rgb(0xd0, 0x6a, 0x2c);
const UNPACKED: Color = Color::Rgb(0x2a, 0x9d, 0x6f);
const MOVED: Color = Color::Rgb(0x1b, 0x6c, 0xa8);

struct Watched {
    run: Run,
    look: Look,
    rates: Rates,
    /// Bytes per second from and to each lender.
    lenders: Vec<(f64, f64)>,
    /// The newest first.
    fetched: VecDeque<u64>,
    unpacked: VecDeque<u64>,
    moved: VecDeque<u64>,
}

impl Watched {
    fn new(run: Run) -> Self {
        let look = run.look();
        let [fetched, unpacked, moved] = [(); 3].map(|()| VecDeque::new());
        Self { run, look, rates: Rates::default(), lenders: Vec::new(), fetched, unpacked, moved }
    }

    fn look_again(&mut self) {
        let look = self.run.look();
        self.rates = Rates::between(&self.look, &look);
        self.lenders = lender_rates(&self.look, &look, self.run.each_lender.len());
        self.look = look;
        let Rates { fetched, unpacked, bytes_in, bytes_out, .. } = self.rates;
        for (curve, value) in [
            (&mut self.fetched, fetched),
            (&mut self.unpacked, unpacked),
            (&mut self.moved, (bytes_in + bytes_out) / 1e3),
        ] {
            curve.push_front(value as u64);
            curve.truncate(HISTORY);
        }
    }
}

/// Shows it until the user has seen enough.
pub fn show(interval: Duration, pid: Option<u32>) -> Result<(), Box<dyn std::error::Error>> {
    let mut terminal = ratatui::try_init()?;
    let result = watch(&mut terminal, interval, pid);
    // The terminal is the user's again, whatever happened.
    ratatui::try_restore()?;
    result
}

fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    interval: Duration,
    pid: Option<u32>,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut watched: Vec<Watched> = Vec::new();
    let mut chosen = TableState::new().with_selected(0);
    let mut next = Instant::now();
    loop {
        if Instant::now() >= next {
            next = Instant::now() + interval;
            refresh(&mut watched, pid);
        }
        terminal.draw(|frame| draw(frame, &watched, &mut chosen))?;
        if !event::poll(next.saturating_duration_since(Instant::now()))? {
            continue;
        }
        let Event::Key(key) = event::read()? else { continue };
        let interrupted = key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c');
        match key.code {
            _ if key.kind != KeyEventKind::Press => {}
            _ if interrupted => return Ok(()),
            KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
            KeyCode::Down | KeyCode::Char('j') => chosen.select_next(),
            KeyCode::Up | KeyCode::Char('k') => chosen.select_previous(),
            _ => {}
        }
    }
}

fn refresh(watched: &mut Vec<Watched>, pid: Option<u32>) {
    watched.retain(|watched| watched.run.is_alive());
    let known: HashMap<u32, ()> = watched.iter().map(|watched| (watched.run.pid, ())).collect();
    watched.iter_mut().for_each(Watched::look_again);
    let new = find(pid).into_iter().filter(|run| !known.contains_key(&run.pid));
    watched.extend(new.map(Watched::new));
    watched.sort_by_key(|watched| watched.run.pid);
}

fn draw(frame: &mut Frame, watched: &[Watched], chosen: &mut TableState) {
    let list = (watched.len() as u16 + 3).min(frame.area().height / 3).max(4);
    let [list, detail, keys] =
        Layout::vertical([Constraint::Length(list), Constraint::Fill(1), Constraint::Length(1)])
            .areas(frame.area());
    let last = watched.len().saturating_sub(1);
    chosen.select(Some(chosen.selected().unwrap_or(0).min(last)));
    draw_list(frame, list, watched, chosen);
    match watched.get(chosen.selected().unwrap_or(0)) {
        Some(watched) => draw_detail(frame, detail, watched),
        None => frame.render_widget(
            Paragraph::new("no program runs on lent memory; start one with `netvm run`")
                .block(Block::new().borders(Borders::ALL)),
            detail,
        ),
    }
    frame.render_widget(Paragraph::new(" arrows: choose a run   q: end").style(Style::new().dim()), keys);
}

/// Columns of the list of runs: their names, their widths (0: what is left), and how wide the list must be for them.
const COLUMNS: [(&str, u16, u16); 9] = [
    ("run", 8, 0),
    ("program", 0, 0),
    ("faults/s", 9, 0),
    ("fetched/s", 9, 76),
    ("wait", 9, 96),
    ("in", 11, 108),
    ("out", 11, 120),
    ("far", 10, 0),
    ("local", 20, 0),
];

fn draw_list(frame: &mut Frame, area: Rect, watched: &[Watched], chosen: &mut TableState) {
    let is_shown = |&(_, _, width): &(&str, u16, u16)| area.width >= width;
    let rows = watched.iter().map(|Watched { run, look, rates, .. }| {
        let cells = [
            run.pid.to_string(),
            run.command.clone(),
            format!("{:.0}", rates.faults),
            format!("{:.0}", rates.fetched),
            rates.fetch_us.map_or("-".to_owned(), |us| format!("{us:.1} us")),
            rate(rates.bytes_in),
            rate(rates.bytes_out),
            pages(look.stats.far_pages),
            format!("{} of {}", pages(look.stats.local_frames), pages(look.budget_frames)),
        ];
        let shown = cells.into_iter().zip(COLUMNS).filter(|(_, column)| is_shown(column));
        Row::new(shown.map(|(cell, _)| cell))
    });
    let widths = COLUMNS.iter().filter(|column| is_shown(column)).map(|&(_, width, _)| match width {
        0 => Constraint::Fill(1),
        width => Constraint::Length(width),
    });
    let header = COLUMNS.iter().filter(|column| is_shown(column)).map(|(name, ..)| *name);
    let table = Table::new(rows, widths)
        .header(Row::new(header).style(Style::new().add_modifier(Modifier::BOLD)))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
        .block(Block::new().borders(Borders::ALL).title(" netvm top "));
    frame.render_stateful_widget(table, area, chosen);
}

/// Width of a bar, and of its label.
const BAR: u16 = 6;

/// A time that bars are labelled with, in whole units.
fn label(ns: u64) -> String {
    match ns {
        1_000_000_000.. => format!("{}s", ns / 1_000_000_000),
        1_000_000.. => format!("{}ms", ns / 1_000_000),
        _ => format!("{}us", ns / 1_000),
    }
}

/// How many reads took how long, for each doubling. At most `most` of them, where most reads are: what is beside them counts in the
/// first and in the last one.
fn octaves(times: &Times, most: usize) -> Vec<(String, u64)> {
    let sum = |counts: &[u64]| counts.iter().fold(0, |sum: u64, count| sum.saturating_add(*count));
    let counts: Vec<u64> = times.counts().chunks(4).map(sum).collect();
    let end_ns = |octave: usize| Times::end_ns(octave * 4 + 3);
    let first = counts.iter().position(|count| *count > 0).unwrap_or(0);
    let last = counts.iter().rposition(|count| *count > 0).unwrap_or(0);
    let bars = (last + 1 - first).min(most.max(1));
    let start =
        (first..=last + 1 - bars).max_by_key(|&start| sum(&counts[start..start + bars])).unwrap_or(first);
    let end = start + bars;
    let bar = |octave: usize| {
        let before = if octave == start { sum(&counts[first..start]) } else { 0 };
        let after = if octave + 1 == end { sum(&counts[end..=last.max(end - 1)]) } else { 0 };
        let name = match octave.checked_sub(1) {
            Some(shorter) if after > 0 => format!(">{}", label(end_ns(shorter))),
            _ => format!("<{}", label(end_ns(octave))),
        };
        (name, counts[octave].saturating_add(before).saturating_add(after))
    };
    (start..end).map(bar).collect()
}

/// How long reads took since the last look.
fn draw_histogram(frame: &mut Frame, area: Rect, rates: &Rates) {
    let most = (area.width.saturating_sub(1) / (BAR + 1)).into();
    let bars: Vec<Bar> = octaves(&rates.reads, most)
        .into_iter()
        .map(|(label, count)| {
            Bar::default().value(count).label(Line::from(label)).text_value(count.to_string())
        })
        .collect();
    let block = Block::new().borders(Borders::ALL).title(" reads by how long they took ");
    let chart = BarChart::default()
        .data(BarGroup::default().bars(&bars))
        .bar_width(BAR)
        .bar_gap(1)
        .bar_style(Style::new().fg(MOVED))
        .block(block);
    frame.render_widget(chart, area);
}

/// As much of a lender's name as there is room for: of a path, its end.
fn shortened(name: &str, room: usize) -> String {
    let length = name.chars().count();
    if length <= room || !name.starts_with("unix:") {
        return name.to_owned();
    }
    std::iter::once('…').chain(name.chars().skip(length + 1 - room.max(1))).collect()
}

fn draw_lenders(frame: &mut Frame, area: Rect, watched: &Watched) {
    // Borders, and figures with the gaps before them.
    let room = area.width.saturating_sub(2 + 2 * 12);
    let is_wide = room >= 28;
    let room = if is_wide { room - 11 } else { room };
    let lenders = watched.run.each_lender.iter().zip(&watched.lenders).zip(watched.look.detail.lender_held);
    let rows = lenders.map(|((lender, (bytes_in, bytes_out)), held)| {
        let name = shortened(lender, room.into());
        let cells = [name, rate(*bytes_in), rate(*bytes_out), Size(held).to_string()];
        Row::new(cells.into_iter().take(if is_wide { 4 } else { 3 }))
    });
    let widths =
        [Constraint::Fill(1), Constraint::Length(11), Constraint::Length(11), Constraint::Length(10)];
    let widths = widths.into_iter().take(if is_wide { 4 } else { 3 });
    let header = Row::new(["lender", "in", "out", "lent"]).style(Style::new().add_modifier(Modifier::BOLD));
    let table = Table::new(rows, widths).header(header).block(Block::new().borders(Borders::ALL));
    frame.render_widget(table, area);
}

/// What there is to say of a run, a line each.
fn lines(watched: &Watched) -> Vec<Line<'static>> {
    let Watched { run, look, rates, .. } = watched;
    let stats = &look.stats;
    let replicas = run.replicas as usize;
    let kept = match run.is_complete(stats) {
        true => crate::runs::protection(replicas, run.erasure),
        false => crate::runs::copies(replicas, run.erasure),
    };
    let ahead = super::ahead(rates).unwrap_or_else(|| "nothing".to_owned());
    let (lost, left) = (run.lost(), run.left());
    let mut lines = vec![
        format!("kept      {}", kept.unwrap_or_else(|| "once: no lender may be lost".to_owned())),
        format!(
            "pages/s   {:.0} fetched, {:.0} unpacked, {:.0} new, {:.0} still there",
            rates.fetched, rates.unpacked, rates.zero_fills, rates.rescues
        ),
        format!("ahead     {ahead}"),
        format!("reads     {}", reads(rates).unwrap_or_else(|| "none".to_owned())),
        format!(
            "local     {} of {}{}",
            pages(stats.local_frames),
            pages(look.budget_frames),
            local_is_good_for(look, rates)
        ),
        format!("lent      {}", held(run, look)),
        format!(
            "so far    {} faults, {} in, {} out",
            stats.faults,
            Size(stats.bytes_in),
            Size(stats.bytes_out)
        ),
    ];
    if !lost.is_empty() {
        let (repaired, poor) = (stats.pages_repaired, stats.pages_unprotected);
        let lost = lost.join(", ");
        lines.push(format!(
            "lost      {repaired} pages copied elsewhere, {poor} lack copies or parts: {lost}"
        ));
    }
    if !left.is_empty() {
        lines.push(format!("left      {} pages moved: {}", stats.pages_moved, left.join(", ")));
    }
    lines.into_iter().map(Line::from).collect()
}

/// What is packed in it, or what more of it would save, as there is one line.
fn local_is_good_for(look: &Look, rates: &Rates) -> String {
    let stats = &look.stats;
    match rates.in_at_twice_local {
        Some(part) if stats.pool_frames == 0 => {
            format!("; twice as much would leave {:.0} % of what comes in", 100.0 * part)
        }
        _ => format!("; {} of it hold {} packed", pages(stats.pool_frames), pages(stats.pool_pages)),
    }
}

/// From so many lines on for curves, bars and processes there is room for the processes.
const PROCESSES_FROM: u16 = 16;
/// Lines of bars and lenders, with their borders, that come before curves.
const BARS: u16 = 6;

fn draw_detail(frame: &mut Frame, area: Rect, watched: &Watched) {
    let Watched { run, rates, fetched, unpacked, moved, .. } = watched;
    let lines = lines(watched);
    let height = lines.len() as u16 + 2;
    let rest = if area.height.saturating_sub(height) >= PROCESSES_FROM {
        Constraint::Fill(1)
    } else {
        Constraint::Length(0)
    };
    let [figures, curves, bars, processes] =
        Layout::vertical([Constraint::Length(height), Constraint::Fill(1), Constraint::Min(BARS), rest])
            .areas(area);
    let title = format!(" {} ", run.command);
    frame
        .render_widget(Paragraph::new(lines).block(Block::new().borders(Borders::ALL).title(title)), figures);
    let [histogram, each_lender] =
        Layout::horizontal([Constraint::Fill(9), Constraint::Fill(11)]).areas(bars);
    draw_histogram(frame, histogram, rates);
    draw_lenders(frame, each_lender, watched);
    let curve_areas: [Rect; 3] = Layout::horizontal([Constraint::Fill(1); 3]).areas(curves);
    let most = |curve: &VecDeque<u64>| curve.iter().max().copied().unwrap_or(0);
    let curves = [
        (format!(" fetched/s, max {} ", most(fetched)), fetched, FETCHED),
        (format!(" unpacked/s, max {} ", most(unpacked)), unpacked, UNPACKED),
        (format!(" moved, max {} ", rate(most(moved) as f64 * 1e3)), moved, MOVED),
    ];
    for (area, (title, curve, color)) in curve_areas.into_iter().zip(curves) {
        let block = Block::new().borders(Borders::ALL).title(title);
        // The newest to the right.
        let width = usize::from(area.width.saturating_sub(2));
        let empty = std::iter::repeat_n(0, width.saturating_sub(curve.len()));
        let data: Vec<u64> = empty.chain(curve.iter().take(width).rev().copied()).collect();
        let sparkline = Sparkline::default().data(data).style(Style::new().fg(color)).block(block);
        frame.render_widget(sparkline, area);
    }
    let rows = run.processes().into_iter().map(|(pid, name, stats)| {
        Row::new([
            pid.to_string(),
            name,
            pages(stats.far_pages),
            pages(stats.local_frames),
            stats.faults.to_string(),
        ])
    });
    let widths = [8, 20, 10, 10, 12].map(Constraint::Length);
    let header = Row::new(["process", "name", "far", "local", "faults"])
        .style(Style::new().add_modifier(Modifier::BOLD));
    frame.render_widget(
        Table::new(rows, widths).header(header).block(Block::new().borders(Borders::ALL)),
        processes,
    );
}

#[cfg(test)]
mod tests;
