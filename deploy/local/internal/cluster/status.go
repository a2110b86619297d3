package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/components"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/network"
)

// Status is the state of the cluster.
type Status struct {
	// Healthy is true when every component and the node are.
	Healthy    bool              `json:"healthy"`
	Components []ComponentStatus `json:"components"`
	Node       NodeStatus        `json:"node"`
	Pods       PodCounts         `json:"pods"`
}

// ComponentStatus is the state of one component.
type ComponentStatus struct {
	Name    string `json:"name"`
	PID     int    `json:"pid,omitempty"`
	Healthy bool   `json:"healthy"`
	// Uptime is in seconds.
	Uptime   float64 `json:"uptimeSeconds,omitempty"`
	Restarts int     `json:"restarts,omitempty"`
	// Problem says what is wrong.
	Problem string `json:"problem,omitempty"`
}

// NodeStatus is the state of the node.
type NodeStatus struct {
	Name    string `json:"name"`
	Ready   bool   `json:"ready"`
	Address string `json:"address"`
	Problem string `json:"problem,omitempty"`
}

// PodCounts counts the Pods of all namespaces.
type PodCounts struct {
	Total int `json:"total"`
	Ready int `json:"ready"`
}

// Inspect returns the state of the cluster. It never fails: what it cannot read is unhealthy.
func Inspect(ctx context.Context, c components.Config, now time.Time) Status {
	status := Status{Healthy: true}
	names := []ComponentStatus{inspectSupervisor(c, now)}
	for _, component := range c.All() {
		names = append(names, inspectComponent(ctx, c, component, now))
	}
	status.Components = names
	status.Node, status.Pods = inspectNode(ctx, c)
	status.Healthy = status.Node.Ready &&
		!slices.ContainsFunc(names, func(component ComponentStatus) bool { return !component.Healthy })
	return status
}

func inspectSupervisor(c components.Config, now time.Time) ComponentStatus {
	status := recorded(c, supervisorName, now)
	status.Healthy = status.Problem == ""
	return status
}

func inspectComponent(ctx context.Context, c components.Config, component components.Component, now time.Time) ComponentStatus {
	status := recorded(c, component.Name, now)
	if status.Problem != "" {
		return status
	}
	if err := c.Check(ctx, component.Probe); err != nil {
		status.Problem = err.Error()
		return status
	}
	status.Healthy = true
	return status
}

// recorded returns what the pid file says about a running process.
func recorded(c components.Config, name string, now time.Time) ComponentStatus {
	status := ComponentStatus{Name: name}
	record, err := host.ReadRecord(c.PIDFile(name))
	switch {
	case err != nil:
		status.Problem = err.Error()
	case !record.Alive():
		status.Problem = "not running"
	default:
		status.PID, status.Restarts = record.PID, record.Restarts
		status.Uptime = now.Sub(record.Started).Seconds()
	}
	return status
}

func inspectNode(ctx context.Context, c components.Config) (NodeStatus, PodCounts) {
	status := NodeStatus{Name: components.NodeName, Address: network.NodeIP}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	set, err := client(c)
	if err != nil {
		status.Problem = err.Error()
		return status, PodCounts{}
	}
	node, err := set.CoreV1().Nodes().Get(ctx, components.NodeName, metav1.GetOptions{})
	if err != nil {
		status.Problem = err.Error()
		return status, PodCounts{}
	}
	status.Ready, status.Problem = nodeReady(node)
	pods, err := set.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		status.Problem = err.Error()
		return status, PodCounts{}
	}
	return status, countPods(pods.Items)
}

func countPods(pods []corev1.Pod) PodCounts {
	counts := PodCounts{Total: len(pods)}
	for _, pod := range pods {
		if slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		}) {
			counts.Ready++
		}
	}
	return counts
}

// Print writes the status as a table, for a person.
func (s Status) Print(out io.Writer) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(table, "COMPONENT\tPID\tHEALTHY\tUPTIME\tRESTARTS\tPROBLEM")
	for _, c := range s.Components {
		pid, uptime := "-", "-"
		if c.PID > 0 {
			pid = fmt.Sprint(c.PID)
			uptime = (time.Duration(c.Uptime) * time.Second).String()
		}
		_, _ = fmt.Fprintf(table, "%s\t%s\t%t\t%s\t%d\t%s\n", c.Name, pid, c.Healthy, uptime, c.Restarts, c.Problem)
	}
	if err := table.Flush(); err != nil {
		return fmt.Errorf("printing the status: %w", err)
	}
	_, err := fmt.Fprintf(out, "\nnode %s (%s): ready=%t %s\npods: %d, of which %d ready\n",
		s.Node.Name, s.Node.Address, s.Node.Ready, s.Node.Problem, s.Pods.Total, s.Pods.Ready)
	return err
}

// Restart stops a component, so that the supervisor starts it again.
func Restart(ctx context.Context, c components.Config, name string) error {
	component, err := Find(c, name)
	if err != nil {
		return err
	}
	if !supervisor(c).Alive() {
		return fmt.Errorf("restarting %s: the cluster is not up", name)
	}
	record, err := host.ReadRecord(c.PIDFile(name))
	if err != nil {
		return err
	}
	if err := record.Stop(ctx, component.Grace); err != nil {
		return fmt.Errorf("restarting %s: %w", name, err)
	}
	err = host.Poll(ctx, readyInterval, func(context.Context) error {
		next, err := host.ReadRecord(c.PIDFile(name))
		if err == nil && (!next.Alive() || next.Process == record.Process) {
			err = errors.New("the supervisor has not started it again")
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("restarting %s: %w", name, err)
	}
	return waitComponent(ctx, c, component)
}

// Find finds a component by its name; the error names those that there are.
func Find(c components.Config, name string) (components.Component, error) {
	var names []string
	for _, component := range c.All() {
		if component.Name == name {
			return component, nil
		}
		names = append(names, component.Name)
	}
	return components.Component{}, fmt.Errorf("no component %q; there are %v", name, names)
}
