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
    Bar, BarChart, BarGroup, Block, Borders, Cell, Paragraph, Row, Sparkline, Table, TableState,
};

use super::{find, micros, pages, rate, reads};
use crate::runs::{Look, Rates, Run, lender_rates};

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

fn draw_list(frame: &mut Frame, area: Rect, watched: &[Watched], chosen: &mut TableState) {
    let header = ["run", "program", "faults/s", "fetched/s", "wait", "in", "out", "far", "local"];
    let rows = watched.iter().map(|Watched { run, look, rates, .. }| {
        Row::new([
            Cell::from(run.pid.to_string()),
            Cell::from(run.command.clone()),
            Cell::from(format!("{:.0}", rates.faults)),
            Cell::from(format!("{:.0}", rates.fetched)),
            Cell::from(rates.fetch_us.map_or("-".to_owned(), |us| format!("{us:.1} us"))),
            Cell::from(rate(rates.bytes_in)),
            Cell::from(rate(rates.bytes_out)),
            Cell::from(pages(look.stats.far_pages)),
            Cell::from(format!("{} of {}", pages(look.stats.local_frames), pages(look.budget_frames))),
        ])
    });
    let widths = [8, 0, 9, 9, 9, 11, 11, 9, 19].map(|width| match width {
        0 => Constraint::Fill(1),
        width => Constraint::Length(width),
    });
    let table = Table::new(rows, widths)
        .header(Row::new(header).style(Style::new().add_modifier(Modifier::BOLD)))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
        .block(Block::new().borders(Borders::ALL).title(" netvm top "));
    frame.render_stateful_widget(table, area, chosen);
}

/// How long reads took since the last look: a bar for each doubling.
fn draw_histogram(frame: &mut Frame, area: Rect, rates: &Rates) {
    let counts = rates.reads.counts();
    let octaves: Vec<(u64, u64)> = counts
        .chunks(4)
        .enumerate()
        .map(|(octave, counts)| {
            (
                Times::end_ns(octave * 4 + 3),
                counts.iter().fold(0, |sum: u64, count| sum.saturating_add(*count)),
            )
        })
        .collect();
    let first = octaves.iter().position(|(_, count)| *count > 0).unwrap_or(0);
    let last = octaves.iter().rposition(|(_, count)| *count > 0).unwrap_or(0);
    let bars: Vec<Bar> = octaves[first..=last]
        .iter()
        .map(|(end_ns, count)| {
            let label = format!("<{}", micros(*end_ns as f64 / 1e3));
            Bar::default().value(*count).label(Line::from(label)).text_value(count.to_string())
        })
        .collect();
    let block = Block::new().borders(Borders::ALL).title(" reads by how long they took ");
    let chart = BarChart::default()
        .data(BarGroup::default().bars(&bars))
        .bar_width(9)
        .bar_gap(1)
        .bar_style(Style::new().fg(MOVED))
        .block(block);
    frame.render_widget(chart, area);
}

fn draw_lenders(frame: &mut Frame, area: Rect, run: &Run, rates: &[(f64, f64)]) {
    let rows =
        run.each_lender.iter().zip(rates).map(|(lender, (bytes_in, bytes_out))| {
            Row::new([lender.clone(), rate(*bytes_in), rate(*bytes_out)])
        });
    let widths = [Constraint::Fill(1), Constraint::Length(11), Constraint::Length(11)];
    let header = Row::new(["lender", "in", "out"]).style(Style::new().add_modifier(Modifier::BOLD));
    let table = Table::new(rows, widths).header(header).block(Block::new().borders(Borders::ALL));
    frame.render_widget(table, area);
}

fn draw_detail(frame: &mut Frame, area: Rect, watched: &Watched) {
    let Watched { run, look, rates, lenders, fetched, unpacked, moved } = watched;
    let stats = &look.stats;
    let [figures, curves, processes] =
        Layout::vertical([Constraint::Length(8), Constraint::Fill(2), Constraint::Fill(1)]).areas(area);
    let ahead = rates.prefetch_hit.map_or("nothing read ahead".to_owned(), |hit| {
        format!("{:.0} % of what was read ahead was used", hit * 100.0)
    });
    let lines = vec![
        Line::from(format!("lenders   {}", run.lenders)),
        Line::from(format!(
            "kept      {}",
            run.protection(stats).unwrap_or_else(|| "once: no lender may be lost".to_owned())
        )),
        Line::from(format!(
            "pages     {:.0} fetched, {:.0} unpacked, {:.0} touched for the first time, {:.0} still there a second; {ahead}",
            rates.fetched, rates.unpacked, rates.zero_fills, rates.rescues
        )),
        Line::from(format!("reads     {}", reads(rates).unwrap_or_else(|| "none".to_owned()))),
        Line::from(format!(
            "local     {} of {}; {} of it hold {} packed",
            pages(stats.local_frames),
            pages(look.budget_frames),
            pages(stats.pool_frames),
            pages(stats.pool_pages)
        )),
        Line::from(format!(
            "so far    {} faults, {} in, {} out",
            stats.faults,
            crate::size::Size(stats.bytes_in),
            crate::size::Size(stats.bytes_out)
        )),
    ];
    let title = format!(" {} ", run.command);
    frame
        .render_widget(Paragraph::new(lines).block(Block::new().borders(Borders::ALL).title(title)), figures);
    let [curves, histogram] = Layout::vertical([Constraint::Fill(1), Constraint::Fill(1)]).areas(curves);
    let [histogram, each_lender] =
        Layout::horizontal([Constraint::Fill(2), Constraint::Fill(1)]).areas(histogram);
    draw_histogram(frame, histogram, rates);
    draw_lenders(frame, each_lender, run, lenders);
    let curve_areas: [Rect; 3] = Layout::horizontal([Constraint::Fill(1); 3]).areas(curves);
    let curves = [
        ("pages fetched/s", fetched, FETCHED, ""),
        ("pages unpacked/s", unpacked, UNPACKED, ""),
        ("moved", moved, MOVED, " kB/s"),
    ];
    for (area, (name, curve, color, unit)) in curve_areas.into_iter().zip(curves) {
        let most = curve.iter().max().copied().unwrap_or(0);
        let title = format!(" {name}, up to {most}{unit} ");
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
