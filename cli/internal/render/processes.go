package render

import (
	"strconv"
	"time"

	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
)

// Processes returns a table of processes.
func Processes(list []*processv1.Process, now time.Time, wide bool) *Table {
	t := NewTable("PID", "TAG", "STATE", "AGE", "COMMAND")
	if wide {
		t = NewTable("PID", "TAG", "STATE", "AGE", "USER", "TTY", "OUTPUT", "KEPT", "COMMAND")
	}
	for _, p := range list {
		row := []string{strconv.Itoa(int(p.GetPid())), p.GetTag(), processState(p), Age(p.GetStartTime().AsTime(), now)}
		if wide {
			row = append(row, strconv.FormatInt(p.GetUid(), 10), yesNo(p.GetTerminal()), bytesWord(p.GetEndOffset()), bytesWord(p.GetEndOffset()-p.GetFirstOffset()))
		}
		t.Add(append(row, quoted(p.GetArgs()))...)
	}
	return t
}

// processState returns whether a process runs, or how it ended.
func processState(p *processv1.Process) string {
	exit := p.GetExit()
	switch {
	case exit == nil:
		return "Running"
	case exit.GetTimedOut():
		return "TimedOut"
	case exit.GetSignal() != 0:
		return "Signal " + strconv.Itoa(int(exit.GetSignal()))
	}
	return "Exit " + strconv.Itoa(int(exit.GetCode()))
}
