package render

import (
	"time"

	authv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/auth/v1"
)

// APIKeys returns a table of API keys; wide adds who created them.
func APIKeys(keys []*authv1.APIKey, now time.Time, wide bool) *Table {
	columns := []string{"ID", "SERVICEACCOUNT", "EXPIRES", "AGE", "DESCRIPTION"}
	if wide {
		columns = append(columns, "CREATED-BY")
	}
	t := NewTable(columns...)
	for _, k := range keys {
		expires := "never"
		if e := k.GetExpireTime(); e != nil {
			if expires = "ended"; e.AsTime().After(now) {
				expires = "in " + Age(now, e.AsTime())
			}
		}
		row := []string{k.GetId(), k.GetServiceAccount(), expires, Age(k.GetCreateTime().AsTime(), now), k.GetDescription()}
		if wide {
			row = append(row, k.GetCreatedBy())
		}
		t.Add(row...)
	}
	return t
}
