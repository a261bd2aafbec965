//! `strftime` for chat templates that write the date into the prompt; UTC, English names.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

/// Formats a time with the date and time directives of C's `strftime`.
///
/// Unknown directives are kept as they are. A time before 1970 counts as 1970.
pub(crate) fn format_time(time: SystemTime, pattern: &str) -> String {
    let seconds = time
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let (days, second_of_day) = (seconds / 86_400, seconds % 86_400);
    let (hour, minute, second) = (
        second_of_day / 3_600,
        second_of_day / 60 % 60,
        second_of_day % 60,
    );
    let date = Date::from_days(days);
    let month_name = MONTHS[date.month as usize - 1];
    // 1 January 1970 was a Thursday.
    let weekday_name = WEEKDAYS[((days + 4) % 7) as usize];
    let hour_of_twelve = (hour + 11) % 12 + 1;

    let mut text = String::new();
    let mut characters = pattern.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        let written = match characters.next() {
            Some('Y') => write!(text, "{}", date.year),
            Some('y') => write!(text, "{:02}", date.year % 100),
            Some('m') => write!(text, "{:02}", date.month),
            Some('d') => write!(text, "{:02}", date.day),
            Some('e') => write!(text, "{:2}", date.day),
            Some('j') => write!(text, "{:03}", date.day_of_year),
            Some('B') => write!(text, "{month_name}"),
            Some('b') => write!(text, "{}", &month_name[..3]),
            Some('A') => write!(text, "{weekday_name}"),
            Some('a') => write!(text, "{}", &weekday_name[..3]),
            Some('H') => write!(text, "{hour:02}"),
            Some('I') => write!(text, "{hour_of_twelve:02}"),
            Some('M') => write!(text, "{minute:02}"),
            Some('S') => write!(text, "{second:02}"),
            Some('p') => write!(text, "{}", if hour < 12 { "AM" } else { "PM" }),
            Some('Z') => write!(text, "UTC"),
            Some('%') => write!(text, "%"),
            Some(other) => write!(text, "%{other}"),
            None => write!(text, "%"),
        };
        written.expect("writing to a string cannot fail");
    }
    text
}

struct Date {
    year: u64,
    month: u64,
    day: u64,
    day_of_year: u64,
}

impl Date {
    /// Converts days since 1 January 1970 to a Gregorian date.
    fn from_days(mut days: u64) -> Self {
        let mut year = 1970;
        // Skip cycles of 400 years first, so that the loop below is bounded.
        year += days / 146_097 * 400;
        days %= 146_097;
        while days >= days_in_year(year) {
            days -= days_in_year(year);
            year += 1;
        }
        let day_of_year = days + 1;
        let february = days_in_year(year) - 337;
        let mut month = 1;
        for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
            if days < length {
                break;
            }
            days -= length;
            month += 1;
        }
        Self {
            year,
            month,
            day: days + 1,
            day_of_year,
        }
    }
}

fn days_in_year(year: u64) -> u64 {
    let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    if leap { 366 } else { 365 }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn format_at(seconds: u64, pattern: &str) -> String {
        format_time(UNIX_EPOCH + Duration::from_secs(seconds), pattern)
    }

    #[test]
    fn known_times_are_formatted_correctly() {
        assert_eq!(
            format_at(0, "%A %d %B %Y %H:%M:%S"),
            "Thursday 01 January 1970 00:00:00"
        );
        assert_eq!(
            format_at(951_782_400, "%a %d %b %Y %j"),
            "Tue 29 Feb 2000 060"
        );
        assert_eq!(
            format_at(1_000_000_000, "%Y-%m-%dT%H:%M:%S"),
            "2001-09-09T01:46:40"
        );
        assert_eq!(
            format_at(1_735_689_599, "%d %b %Y %I:%M %p"),
            "31 Dec 2024 11:59 PM"
        );
        assert_eq!(format_at(4_107_542_400, "%e.%m.%y %I%p"), " 1.03.00 12AM");
    }

    #[test]
    fn unknown_directives_are_kept() {
        assert_eq!(format_at(0, "100%% %q é %"), "100% %q é %");
    }
}
