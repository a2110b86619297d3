package report

import (
	"fmt"
	"strconv"
)

// Environment is the machine, and what runs containers on it.
type Environment struct {
	CPU        string  `json:"cpu"`
	Cores      int     `json:"cores"`
	MemoryMiB  int     `json:"memory_mib"`
	Kernel     string  `json:"kernel"`
	Go         string  `json:"go"`
	Containerd string  `json:"containerd,omitempty"`
	Runc       string  `json:"runc,omitempty"`
	Load       float64 `json:"load_before"` // 1-minute load average when the run began
}

// Facts are the environment for people.
func (e Environment) Facts() [][2]string {
	out := [][2]string{
		{"cpu", fmt.Sprintf("%d x %s", e.Cores, e.CPU)}, {"memory", fmt.Sprintf("%d MiB", e.MemoryMiB)},
		{"kernel", e.Kernel}, {"go", e.Go}, {"load before", strconv.FormatFloat(e.Load, 'f', 2, 64)},
	}
	if e.Containerd != "" {
		out = append(out, [2]string{"containerd", e.Containerd})
	}
	if e.Runc != "" {
		out = append(out, [2]string{"runc", e.Runc})
	}
	return out
}
