package render

import (
	"fmt"
	"time"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
)

// Images returns a table of the images of a pool: a row for each image, or with wide for each image on each node.
func Images(images []*allocatorv1.PoolImage, wide bool) *Table {
	if !wide {
		t := NewTable("IMAGE", "PINNED", "NODES")
		for _, i := range images {
			present := 0
			for _, n := range i.GetNodes() {
				if n.GetPresent() {
					present++
				}
			}
			t.Add(i.GetImage(), yesNo(i.GetPinned()), fmt.Sprintf("%d/%d", present, len(i.GetNodes())))
		}
		return t
	}
	t := NewTable("IMAGE", "PINNED", "NODE", "AGENT", "PRESENT", "STATE", "MESSAGE")
	for _, i := range images {
		for _, n := range i.GetNodes() {
			t.Add(i.GetImage(), yesNo(i.GetPinned()), n.GetNodeName(), n.GetAgentPod(), yesNo(n.GetPresent()),
				word(n.GetState().String(), "PINNED_IMAGE_STATE_"), n.GetMessage())
		}
	}
	return t
}

// Pulls returns a table of the results of a pull, one row for each node.
func Pulls(results []*allocatorv1.PullImageResponse) *Table {
	t := NewTable("NODE", "AGENT", "RESULT", "TIME", "MESSAGE")
	for _, r := range results {
		took := ""
		if elapsed := r.GetProgress().GetElapsed(); elapsed != nil {
			took = elapsed.AsDuration().Round(100 * time.Millisecond).String()
		}
		t.Add(r.GetNodeName(), r.GetAgentPod(), r.GetProgress().GetPhase(), took, r.GetError())
	}
	return t
}

// PullProgress returns the progress of a pull: its phase, and the part that is downloaded if that is known.
func PullProgress(p *agentv1.PullProgress) string {
	if p.GetPhase() != "downloading" || p.GetTotalBytes() <= 0 {
		return p.GetPhase()
	}
	return fmt.Sprintf("%s %d%%", p.GetPhase(), 100*p.GetDownloadedBytes()/p.GetTotalBytes())
}
